"""The whole loop on one machine: tasks, agents, gate, engine, lake, rows, and the proof that the rows are right."""
