// Before it comes, generated, `transposed`: what pulls back through the field.

// The gradients of the parameters of a trajectory, and of those shared.
struct Gradient {
  T* own;
  size_t own_stride;
  T* shared;
  size_t shared_stride;
};

// Pull back through `f(w, t)`.
DEVICE void pull_field(
    const Lane& lane, const T* to_k, const T* w, T t, T* to_w, const Gradient& gradient) {
  T out[N + OWN_PARAMETERS + SHARED_PARAMETERS];
  transposed(lane, to_k, w, t, out);
  UNROLL for (int i = 0; i < N; ++i) to_w[i] = out[i];
  UNROLL_OWN for (int j = 0; j < OWN_PARAMETERS; ++j)
    gradient.own[j * gradient.own_stride] += out[N + j];
  UNROLL_SHARED for (int j = 0; j < SHARED_PARAMETERS; ++j)
    gradient.shared[j * gradient.shared_stride] += out[N + OWN_PARAMETERS + j];
}
