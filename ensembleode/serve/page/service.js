// What the page asks of the service.

const KEY = "ensembleode-token";

/** The service refused or failed: `status`, `code`, `message`, `path` of the bad field, `id`. */
export class ServiceError extends Error {
  constructor(status, { code = "", message, path = null, id = null }, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, path, id, retryAfter });
  }
}

let token = null;

/** The token of this tab; kept in memory alone where the browser allows no storage. */
export function useToken(value) {
  token = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // Storage is blocked.
  }
}

function currentToken() {
  if (token === null) {
    try {
      token = sessionStorage.getItem(KEY);
    } catch {
      // Storage is blocked.
    }
  }
  return token;
}

export function hasToken() {
  return Boolean(currentToken());
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (hasToken()) headers.Authorization = `Bearer ${currentToken()}`;
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
  const message = `The service answered ${answer.status} ${answer.statusText}.`;
  throw new ServiceError(
    answer.status,
    error ?? { message },
    Number(answer.headers.get("Retry-After")) || null,
  );
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
