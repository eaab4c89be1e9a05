"""The largest numbers that make sense; what is beyond is refused before it takes memory."""

MOST_ITERATIONS = 1_000_000  # of a solver; one that needs more does not converge
MOST_KEPT = 1_000  # iterations of which a model is written: each is a folder
MOST_COMBINATIONS = 10_000  # of values to try: each is a merge
MOST_RANK = 1_000_000  # no layer is wider
MOST_AT_ONCE = 1_000_000  # examples or tokens in a batch
MOST_COUNTED = 10**12  # examples, batches, models: what is only counted
MOST_POWER = 16  # of ratios of sizes, which then differ by all digits there are
NUM_SEEDS = 2**32  # what all random number generators take
MOST_SAMPLES = 10_000  # passes back for each example
MOST_PADDED = 1 << 20  # what the number of rows of an embedding is to be divided by
