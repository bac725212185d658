"""Whether what is traced is for one device of several, as JAX's caches of traces know it.

JAX forgets what it has compiled when this is made: so that is done when JAX is imported.
"""

import jax


device_is_given = jax.make_user_context(default_value=False)
