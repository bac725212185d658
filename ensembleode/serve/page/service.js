// What the page asks of the service.

const KEY = "ensembleode-token";

/** The service refused or failed: `status`, `message`, `path` of the bad field, `id`. */
export class ServiceError extends Error {
  constructor(status, { message, path = null, id = null }, retryAfter = null) {
    super(message);
    Object.assign(this, { status, path, id, retryAfter });
  }
}

/** What is made of the tab's storage; null where the browser allows none. */
function stored(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}

let token = stored((storage) => storage.getItem(KEY));

/** The token of this tab; kept in memory alone where the browser allows no storage. */
export function useToken(value) {
  token = value;
  stored((storage) => storage.setItem(KEY, value));
}

export function hasToken() {
  return Boolean(token);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (hasToken()) headers.Authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(0, { message: "The service does not answer." });
  }
  if (answer.ok) return answer;
  let error = null;
  try {
    ({ error } = await answer.json());
  } catch {
    // Not from the service itself: a proxy, say.
  }
  error ??= { message: `The service answered ${answer.status} ${answer.statusText}.` };
  const retryAfter = Number(answer.headers.get("Retry-After")) || null;
  throw new ServiceError(answer.status, error, retryAfter);
}

/** All problems, as the registry describes them. */
export async function problems() {
  return (await (await ask("v1/problems")).json()).problems;
}

/** The answer to one solve request. */
export async function solve(name, body, signal) {
  const answer = await ask(`v1/problems/${encodeURIComponent(name)}/solve`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  return answer.json();
}

/** The text of /metrics. */
export async function metrics() {
  return (await ask("metrics")).text();
}
