"""Everything that knows a process group: CPU ranks, start-up of the ranks, sequence layouts."""
