"""Compiling step programs for a TPU that is not there: `libtpu` holds the real compiler and runs it on any
Linux machine. FLOPs, memory and refusals come from that compiler; nothing here says how long a step takes."""
