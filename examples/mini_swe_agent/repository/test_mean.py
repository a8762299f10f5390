from mean import mean

assert mean([1, 2, 3]) == 2
