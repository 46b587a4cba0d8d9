"""Laws that hold for every policy, architecture and batch, a file each:

1. test_k_one_is_the_unpatched_model    at k=1.0 nothing changes
2. test_model_is_restored               after the block the model is as before
3. test_held_within_budget              budgets, positions and protected tokens, between steps
4. (tests/oracle)                       evictions and logits are the brute force's over the kept tokens
5. test_rows_are_as_alone               a row of a batch gives what it gives alone
6. test_blocks_equal_pieces             `block` is feeding blocks one after another
7. test_seeds                           the same seed gives the same text
8. test_backends_agree                  every backend computes what the torch backend computes
9. test_training_outside_is_inside      a training step inside the block is the one outside
10. test_bytes                          what is allocated is what is held, and a stated slack
11. test_whatever_is_done_to_a_cache    rows that move, copies, files, steps taken back: each text goes on as alone

Each is seen to fail on a sabotaged copy of the library: tests/robustness/test_mutants.py.
"""
