# nemo_gym lives in an environment of its own: what a lake uses of its token capture, and no more.
