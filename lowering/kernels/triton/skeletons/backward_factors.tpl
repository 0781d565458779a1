unit = scale * LOG2E  $if plain
survivor = 1.0 / (1.0 - $rate)  $if dropped
