"""By-products of pack and unpack: gradient norms, and which rank had a NaN or Inf in which gradient."""
