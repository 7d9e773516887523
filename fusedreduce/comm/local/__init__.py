"""Ranks that are threads of this process: LocalGroup, its collectives, and a torch process group over them."""
