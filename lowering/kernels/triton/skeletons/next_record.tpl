if i > 0:  $if tabled
    $include record
