"""Pipeline-parallel inference: layers in stages, each in a process of its own (EE-LLM, section 4)."""
