import time


class Worker:
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        time.sleep(0.2)

    def compile_or_warm_up_model(self) -> None:
        time.sleep(0.1)
