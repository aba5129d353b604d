"""From a configuration to a finished run: the experiment, its processes, recovery, Ray and the run
folder."""
