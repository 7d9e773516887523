"""Times of a step: clocks, the trace file and its reader, and the reports, timelines and plans made of it."""
