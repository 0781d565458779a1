$# The first record of a row, loaded together with their number: a row has room for one at least.
used = tl.load(Count + entry)  $if tabled
record = Spans + entry.to(tl.int64) * records * 4  $if tabled
lo, full_lo = tl.load(record), tl.load(record + 1)  $if tabled
full_hi, hi = tl.load(record + 2), tl.load(record + 3)  $if tabled
