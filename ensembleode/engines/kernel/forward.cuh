// The kernel that solves: a thread a trajectory.

KERNEL(BLOCK) solve(SOLVE_PARAMETERS) {
  if (THREAD >= sizes[0]) return;
  const Lane lane = lane_of(THREAD, SOLVE_ARGUMENTS);
  const size_t n = lane.n, at = lane.i;
  State state = start(lane);
  Step step;
  int row = 0;
#if MODE == TIMES
  for (; row < lane.rows && time_at(lane, row) == state.t; ++row)
    UNROLL for (int i = 0; i < N; ++i) out_u[(size_t(row) * N + i) * n + at] = state.y[i];
  const T direction = sign_of(t1(lane) - t0(lane));
#elif MODE == STEPS
  if (SAVES_START) {
    UNROLL for (int i = 0; i < N; ++i) out_u[size_t(i) * n + at] = state.y[i];
    out_t[at] = state.t;
    row = 1;
  }
#endif
  int code = -1;
  while (code < 0) {
    // Lost, an adaptive solve tries once more: does a step too short for time to feel move it?
    bool probes = false, calm = false;
    if (!state.active || state.ntried >= lane.maxiters) {
      if (state.t == t1(lane) && all_finite(state.y)) {
        code = SUCCESS;
      } else if (state.active) {
        code = MAX_ITERS;
      } else if (!ADAPTIVE || !lane.wanted) {
        code = UNSTABLE;
      }
      if (code >= 0) break;
      probes = true;
      state.h *= 5;  // one that failed for being infinite or NaN was that much longer
      calm = is_finite(state.h);
    }
    advance(lane, state, step);
    if (probes) {
      UNROLL for (int i = 0; i < CONTROLLED; ++i) {
        const T moved = do_abs(step.y2[i] - state.y[i]);
        calm = calm && moved <= T(1e-4) * do_abs(state.y[i]) + abstol(lane, i);
      }
      state.naccept -= step.accepted;
      --state.ntried;
      code = calm ? DT_LESS_THAN_MIN : UNSTABLE;
      break;
    }
    if (!step.accepted) continue;
#if MODE == TIMES
    bool has_last_stages = false;
    while (row < lane.rows && direction * (step.t2 - time_at(lane, row)) >= 0) {
      if (!has_last_stages) last_stages(lane, state.y, state.t, step.h, step.k);
      has_last_stages = true;
      T u[N];
      interpolate(state.y, step.k, step.h, (time_at(lane, row) - state.t) / step.h, u);
      UNROLL for (int i = 0; i < N; ++i) out_u[(size_t(row) * N + i) * n + at] = u[i];
      ++row;
    }
#elif MODE == STEPS
    if (row < lane.rows) {
      UNROLL for (int i = 0; i < N; ++i) out_u[(size_t(row) * N + i) * n + at] = step.y2[i];
      out_t[size_t(row) * n + at] = step.t2;
      ++row;
    }
#endif
    accept(state, step);
  }
#if MODE == ENDS
  UNROLL for (int i = 0; i < N; ++i) out_u[size_t(i) * n + at] = state.y[i];
#else
  out_counts[3 * n + at] = row;
  for (; row < lane.rows; ++row) {
    UNROLL for (int i = 0; i < N; ++i) out_u[(size_t(row) * N + i) * n + at] = nan_of(T(0));
#if MODE == STEPS
    out_t[size_t(row) * n + at] = nan_of(T(0));
#endif
  }
#endif
  out_counts[at] = code;
  out_counts[n + at] = state.naccept;
  out_counts[2 * n + at] = state.ntried;
}
