// The time loop of one trajectory, in one thread: that of the lanes engine (`lanes/loop.py` and
// `lanes/controller.py`), line by line.
//
// Before it come, generated: the constants in capitals, `struct Lane` with the numbers of a
// trajectory (`t0(lane)`, `abstol(lane, i)`, ...), and from the field and the tableau `field`,
// `first_stages`, `last_stages`, `error_estimate` and `interpolate`.

// What has been reached: as the lanes engine's `State`.
struct State {
  T t, h;
  T y[N], k[N];
  float memory;
  bool active;
  int naccept, ntried;
};

// A step that has been tried, of the signed size `h`.
struct Step {
  T t2, h;
  T y2[N], k[ALL_STAGES][N];
  bool accepted;
};

DEVICE T sign_of(T x) { return do_sign(x); }

DEVICE bool all_finite(const T* y) {
  T sum = 0;
  UNROLL for (int i = 0; i < CONTROLLED; ++i) sum += y[i] * 0;
  return sum == 0;
}

// Time after a step; `t1` itself where rounding alone keeps it from that.
DEVICE T landed(T before, T t, T t1) {
  const T largest = do_max(do_abs(before), do_abs(t1));
  return do_abs(t - t1) < 100 * EPS * largest ? t1 : t;
}

// The step size that time hardly feels.
DEVICE T least_step(T t, T span) {
  const T spacing = bitcast<T>(bitcast<BITS>(t) & EXPONENT) * EPS;
  return do_max(spacing, EPS * EPS * do_abs(span));
}

//
// Step-size control
//

// The binary logarithm of a positive number, to within 1e-3 (Goldberg's formula).
DEVICE float quick_log2(float x) {
  const int bits = bitcast<int>(x);
  const int exponent = (bits & 0x7f800000) >> 23;
  const bool upper_half = (bits & 0x00400000) != 0;
  const int base = upper_half ? 0x3f000000 : 0x3f800000;
  const float s = bitcast<float>((bits & 0x007fffff) | base) - 1;
  const int whole = exponent - (upper_half ? 126 : 127);
  return float(whole) + s * (LOG2_A * s + LOG2_B) / (s + LOG2_C);
}

// Two to this power, to within rounding (Taylor's polynomial).
DEVICE float quick_exp2(float x) {
  x = do_min(do_max(x, -126.0f), 126.0f);
  const float whole = do_floor(x + 0.5f);
  const float rest = x - whole;
  float value = EXP2_LAST;
  EXP2_TERMS(value, rest)
  return value * bitcast<float>((int(whole) + 127) << 23);
}

DEVICE T scaled_norm(const Lane& lane, const T* values, const T* y, const T* y2) {
  T sum = 0;
  UNROLL for (int i = 0; i < CONTROLLED; ++i) {
    const T largest = do_max(do_abs(y[i]), do_abs(y2[i]));
    const T scaled = values[i] / (abstol(lane, i) + reltol(lane, i) * largest);
    sum += scaled * scaled;
  }
  return do_sqrt(sum * (1 / T(CONTROLLED)));
}

// The size of the first step, from two evaluations (Hairer's estimate).
DEVICE T initial_step(const Lane& lane, const T* y, const T* k) {
  const T span = t1(lane) - t0(lane), length = do_abs(span);
  const T d0 = scaled_norm(lane, y, y, y), d1 = scaled_norm(lane, k, y, y);
  T probe = d0 < T(1e-5) || d1 < T(1e-5) ? T(1e-6) : T(0.01) * (d0 / d1);
  probe = do_min(probe, length);
  const T step = sign_of(span) * probe;
  T moved[N], k2[N];
  UNROLL for (int i = 0; i < N; ++i) moved[i] = y[i] + step * k[i];
  field(lane, moved, t0(lane) + step, k2);
  UNROLL for (int i = 0; i < N; ++i) k2[i] -= k[i];
  const T d2 = scaled_norm(lane, k2, y, y) / probe;
  const T most = do_max(d1, d2);
  const T by_error = do_pow(T(10), -(2 + do_log10(most)) / T(CONTROLLER_ORDER));
  const T dt = most <= T(1e-15) ? do_max(T(1e-6), T(1e-3) * probe) : by_error;
  return do_min(do_min(100 * probe, dt), length);
}

//
// Steps
//

DEVICE State start(const Lane& lane) {
  State state;
  state.t = t0(lane);
  UNROLL for (int i = 0; i < N; ++i) state.y[i] = u0(lane, i);
  state.active = lane.wanted && all_finite(state.y);
  if (FSAL || !HAS_DT) field(lane, state.y, state.t, state.k);
  state.h = do_abs(HAS_DT ? dt(lane) : initial_step(lane, state.y, state.k));
  if (ADAPTIVE) state.active = state.active && is_finite(state.h);
  state.memory = INITIAL_MEMORY;
  state.active = state.active && t0(lane) != t1(lane);
  state.naccept = state.ntried = 0;
  return state;
}

// Try one step, from a state that goes on. It moves when the step is `accept`ed.
DEVICE void advance(const Lane& lane, State& state, Step& step) {
  const T end = t1(lane), span = end - t0(lane), direction = sign_of(span);
  const T size = do_min(state.h, do_abs(end - state.t));
  step.t2 = landed(state.t, state.t + direction * size, end);
  // As time has it after rounding: otherwise the state would be ahead of it, or behind.
  step.h = step.t2 - state.t;
  if (FSAL) {
    UNROLL for (int i = 0; i < N; ++i) step.k[0][i] = state.k[i];
  } else {
    field(lane, state.y, state.t, step.k[0]);
  }
  first_stages(lane, state.y, state.t, step.h, step.k, step.y2);
  bool lost = false;
  if (ADAPTIVE) {
    T error[N];
    error_estimate(step.k, step.h, error);
    const T norm = scaled_norm(lane, error, state.y, step.y2);
    step.accepted = norm <= 1;
    const float log_error = quick_log2(float(norm));
    const float power = quick_exp2(BETA1 * log_error);
    const float least = state.naccept == 0 ? LEAST_FIRST : LEAST;
    float q = do_min(do_max(power / state.memory * (1 / GAMMA), least), SHRINK_MOST);
    if (!step.accepted) q = do_min(power * (1 / GAMMA), SHRINK_MOST);
    if (step.accepted) state.memory = quick_exp2(BETA2 * do_max(log_error, LOG_LEAST_ERROR));
    state.h = size / T(q);
    lost = state.h <= least_step(step.accepted ? step.t2 : state.t, span);
  } else {
    step.accepted = all_finite(step.y2);
  }
  const bool ends = step.accepted && step.t2 == end;
  state.active = ADAPTIVE ? !(ends || lost) : step.accepted && !ends;
  state.naccept += step.accepted;
  ++state.ntried;
}

DEVICE void accept(State& state, const Step& step) {
  state.t = step.t2;
  UNROLL for (int i = 0; i < N; ++i) state.y[i] = step.y2[i];
  if (FSAL) {
    UNROLL for (int i = 0; i < N; ++i) state.k[i] = step.k[STAGES - 1][i];
  }
}
