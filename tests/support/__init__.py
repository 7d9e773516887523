"""What tests share: rank processes, communicators without them, stand-ins for CUDA, and what ranks run."""
