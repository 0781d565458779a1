"""$title in Triton, written by frisket for

    $plan

$dims.
$launches
"""

import triton
import triton.language as tl

$constants
