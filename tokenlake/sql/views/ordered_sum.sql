-- what: the sum of a list of DOUBLEs taken one after the other, from the first to the last: what it comes to, to the
--   last bit, depends on nothing else
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO ordered_sum(numbers) AS -- noqa: CP05
list_reduce( -- noqa: PRS
    numbers,
    LAMBDA total, each: total + each,
    0.0::DOUBLE
);
