"""Make up a lesson for `jupyter gpu simulate`: a class that works through the same exercises, each student at their own pace.

    python lesson.py 60 lesson
    jupyter gpu simulate --trace lesson-sessions.csv lesson-cells.csv --devices 2x80GiB --policy jupyter_gpu_config.py

Assumed, and to be replaced by what your class does: 90 minutes; a cell with the GPU lasts 20 seconds in the median (one in ten over a
minute) and comes after 4 minutes of reading and typing (median); a kernel holds 1 to 8 GB once it has begun; the GPU computes for a
third of such a cell. Everybody begins within five minutes, which is the hardest moment.
"""

import csv
import random
import sys

LESSON_S = 90 * 60


def main(students: int, name: str) -> None:
    draw = random.Random(1)
    with open(f"{name}-sessions.csv", "w", newline="") as sessions, open(f"{name}-cells.csv", "w", newline="") as cells:
        opened, ran = csv.writer(sessions), csv.writer(cells)
        opened.writerow(["session", "user", "open_s", "close_s", "gpus", "gpu_mib"])
        ran.writerow(["session", "user", "start_s", "duration_s", "gpus", "gpu_mib", "gpu_util"])
        for number in range(students):
            begin = draw.uniform(0, 300)
            holds = round(draw.uniform(1000, 8000))
            opened.writerow([f"s{number}", f"student{number}", round(begin, 1), round(begin + LESSON_S, 1), 1, holds])
            now = begin + draw.uniform(10, 120)
            while now < begin + LESSON_S - 120:
                lasts = min(300.0, 20 * draw.lognormvariate(0, 0.85))
                ran.writerow([f"s{number}", f"student{number}", round(now, 1), round(lasts, 1), 1, holds, 33])
                now += lasts + 240 * draw.lognormvariate(0, 0.8)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
