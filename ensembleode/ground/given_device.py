"""A context that says whether code is traced for one device of several, and that JAX's caches of
traces take into account.

JAX forgets everything that it has compiled when the context is made. So it is made when JAX is
imported.
"""

import jax


device_is_given = jax.make_user_context(default_value=False)
