record = Spans + (entry.to(tl.int64) * records + i) * 4  $if tabled
lo, full_lo = tl.load(record), tl.load(record + 1)  $if tabled
full_hi, hi = tl.load(record + 2), tl.load(record + 3)  $if tabled
