"""The state of one text: turns, ragged layers, compiled steps, memory."""
