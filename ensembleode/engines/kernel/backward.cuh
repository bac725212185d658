// The kernel that pulls cotangents back: records the steps of a trajectory, and replays them
// backwards (as `lanes/adjoint.py`, where the method's source is).
//
// The record holds a segment of `lane.record` steps; of the segments before the last a checkpoint is
// kept, from which they are recorded anew. A thread has its place in both for one trajectory after
// the other. The threads of a group share their parameters, whose gradients are summed up later.

// Pull back through a step; `row` is how many of the saved states are left.
DEVICE void pull_step(
    const Lane& lane, T t, T h, const T* y, const T* __restrict__ cotangent, T* adjoint, int& row,
    const Gradient& gradient) {
  const size_t n = lane.n, at = lane.i;
  T k[ALL_STAGES][N], y2[N], to_k[ALL_STAGES][N], to_y[N];
  UNROLL for (int i = 0; i < N; ++i) to_y[i] = 0;
  for (int s = 0; s < ALL_STAGES; ++s)
    UNROLL for (int i = 0; i < N; ++i) to_k[s][i] = 0;
  field(lane, y, t, k[0]);
  first_stages(lane, y, t, h, k, y2);
#if MODE == TIMES
  const T direction = sign_of(t1(lane) - t0(lane));
  bool is_dense = false;
  while (row > 0 && direction * (time_at(lane, row - 1) - t) > 0) {
    is_dense = true;
    --row;
    T to_u[N];
    UNROLL for (int i = 0; i < N; ++i) {
      to_u[i] = cotangent[(size_t(row) * N + i) * n + at];
      to_y[i] += to_u[i];
      to_u[i] *= h;
    }
    pull_interpolant((time_at(lane, row) - t) / h, to_u, to_k);
  }
  if (is_dense && ALL_STAGES > STAGES) {
    last_stages(lane, y, t, h, k);
    pull_last_stages(lane, y, t, h, k, to_k, to_y, gradient);
  }
#elif MODE == STEPS
  --row;
  UNROLL for (int i = 0; i < N; ++i) adjoint[i] += cotangent[(size_t(row) * N + i) * n + at];
#endif
  pull_first_stages(lane, y, t, h, k, adjoint, to_k, to_y, gradient);
  UNROLL for (int i = 0; i < N; ++i) adjoint[i] = to_y[i];
}

#if MODE != STEPS

#define RECORDED(slot, x) record[(size_t(slot) * (N + 2) + (x)) * threads + thread]
#define KEPT(slot, x) kept[(size_t(slot) * (N + 3) + (x)) * threads + thread]

// Run until the segment is full, or the end; returns how many steps were taken.
DEVICE int record_segment(
    const Lane& lane, State& state, T* __restrict__ record, size_t threads, size_t thread) {
  int count = 0;
  Step step;
  while (state.active && count < lane.record && state.ntried < lane.maxiters) {
    advance(lane, state, step);
    if (!step.accepted) continue;
    UNROLL for (int i = 0; i < N; ++i) RECORDED(count, i) = state.y[i];
    RECORDED(count, N) = state.t;
    RECORDED(count, N + 1) = step.h;
    ++count;
    accept(state, step);
  }
  return count;
}

#endif

KERNEL(BLOCK) pull_back(PULL_BACK_PARAMETERS) {
  const size_t threads = sizes[3], thread = THREAD;
  if (thread >= threads) return;
  const int group = int(thread) / sizes[4], first = int(thread) % sizes[4];
  Gradient gradient;
  T own_here[OWN_HERE], shared_here[SHARED_HERE];
  const bool has_shared_here = SHARED_PARAMETERS <= SHARED_HERE;
  gradient.shared = has_shared_here ? shared_here : out_shared + thread;
  gradient.shared_stride = has_shared_here ? 1 : threads;
  UNROLL_SHARED for (int j = 0; j < SHARED_PARAMETERS; ++j)
    gradient.shared[j * gradient.shared_stride] = 0;
  for (int place = first; place < sizes[5]; place += sizes[4]) {
    const Lane lane = lane_of(group * sizes[5] + place, PULL_BACK_ARGUMENTS);
    const size_t n = lane.n, at = lane.i;
    const bool has_own_here = OWN_PARAMETERS <= OWN_HERE;
    gradient.own = has_own_here ? own_here : out_own + at;
    gradient.own_stride = has_own_here ? 1 : n;
    UNROLL_OWN for (int j = 0; j < OWN_PARAMETERS; ++j) gradient.own[j * gradient.own_stride] = 0;
    T adjoint[N], y[N];
    UNROLL for (int i = 0; i < N; ++i) adjoint[i] = 0;
    if (lane.wanted) {
#if MODE == ENDS
      UNROLL for (int i = 0; i < N; ++i) adjoint[i] = cotangent[size_t(i) * n + at];
      int row = 0;
#elif MODE == TIMES
      int row = 0;
      while (row < lane.rows && is_finite(time_at(lane, row))) ++row;
#else
      int row = lengths[at];
#endif
#if MODE == STEPS
      // Every step was saved.
      while (row > SAVES_START) {
        const bool is_first = row == 1;
        UNROLL for (int i = 0; i < N; ++i)
          y[i] = is_first ? u0(lane, i) : saved_u[(size_t(row - 2) * N + i) * n + at];
        const T t = is_first ? t0(lane) : saved_t[size_t(row - 2) * n + at];
        const T h = saved_t[size_t(row - 1) * n + at] - t;
        pull_step(lane, t, h, y, cotangent, adjoint, row, gradient);
      }
#else
      State state = start(lane);
      int segment = -1, count = 0;
      do {
        ++segment;
        UNROLL for (int i = 0; i < N; ++i) KEPT(segment, i) = state.y[i];
        KEPT(segment, N) = state.t;
        KEPT(segment, N + 1) = state.h;
        KEPT(segment, N + 2) = state.memory;
        count = record_segment(lane, state, record, threads, thread);
      } while (state.active && state.ntried < lane.maxiters);
      for (;;) {
        while (count-- > 0) {
          UNROLL for (int i = 0; i < N; ++i) y[i] = RECORDED(count, i);
          const T t = RECORDED(count, N), h = RECORDED(count, N + 1);
          pull_step(lane, t, h, y, cotangent, adjoint, row, gradient);
        }
        if (segment-- == 0) break;
        UNROLL for (int i = 0; i < N; ++i) state.y[i] = KEPT(segment, i);
        state.t = KEPT(segment, N);
        state.h = KEPT(segment, N + 1);
        state.memory = float(KEPT(segment, N + 2));
        if (FSAL) field(lane, state.y, state.t, state.k);
        state.active = true;
        state.naccept = segment > 0;
        state.ntried = 0;
        count = record_segment(lane, state, record, threads, thread);
      }
#if MODE == TIMES
      // Those saved at the start.
      while (row-- > 0)
        UNROLL for (int i = 0; i < N; ++i) adjoint[i] += cotangent[(size_t(row) * N + i) * n + at];
#endif
#endif
    }
    UNROLL for (int i = 0; i < N; ++i) out_u0[size_t(i) * n + at] = adjoint[i];
    if (has_own_here)
      UNROLL_OWN for (int j = 0; j < OWN_PARAMETERS; ++j) out_own[j * n + at] = own_here[j];
  }
  if (has_shared_here)
    UNROLL_SHARED for (int j = 0; j < SHARED_PARAMETERS; ++j)
      out_shared[j * threads + thread] = shared_here[j];
}
