"""Text about the capitals of countries, from which the small model that `make serve` serves has learned them.

python -m benchmarks.checkpoints.capitals FILE
"""

import argparse
import random
from pathlib import Path

ROUNDS = 60
CAPITALS = dict(
    pair.split("=")
    for pair in """
    Argentina=Buenos Aires,Austria=Vienna,Belgium=Brussels,Brazil=Brasilia,Bulgaria=Sofia,Canada=Ottawa,Chile=Santiago,
    China=Beijing,Colombia=Bogota,Croatia=Zagreb,Cuba=Havana,Denmark=Copenhagen,Egypt=Cairo,Estonia=Tallinn,
    Finland=Helsinki,France=Paris,Germany=Berlin,Ghana=Accra,Greece=Athens,Hungary=Budapest,Iceland=Reykjavik,
    India=New Delhi,Indonesia=Jakarta,Ireland=Dublin,Italy=Rome,Jamaica=Kingston,Japan=Tokyo,Kenya=Nairobi,Latvia=Riga,
    Lithuania=Vilnius,Mexico=Mexico City,Mongolia=Ulaanbaatar,Morocco=Rabat,Nepal=Kathmandu,New Zealand=Wellington,
    Nigeria=Abuja,Norway=Oslo,Pakistan=Islamabad,Peru=Lima,Poland=Warsaw,Portugal=Lisbon,Romania=Bucharest,
    Senegal=Dakar,Serbia=Belgrade,Slovakia=Bratislava,Slovenia=Ljubljana,South Korea=Seoul,Spain=Madrid,
    Sweden=Stockholm,Switzerland=Bern,Thailand=Bangkok,Tunisia=Tunis,Turkey=Ankara,Uganda=Kampala,Ukraine=Kyiv,
    United Kingdom=London,Uruguay=Montevideo,Vietnam=Hanoi,Zambia=Lusaka,Zimbabwe=Harare
    """.replace("\n", "")
    .replace("    ", "")
    .split(",")
)
SENTENCES = (
    "The capital of {0} is {1}.",
    "{1} is the capital of {0}.",
    "Q: What is the capital of {0}? A: {1}.",
    "Q: Of which country is {1} the capital? A: {0}.",
)


def text(rounds: int = ROUNDS, seed: int = 0) -> str:
    """`rounds` times all sentences about all countries, one a line, each time in another order."""
    lines = [sentence.format(*names) for names in CAPITALS.items() for sentence in SENTENCES]
    order = random.Random(seed)
    return "".join(f"{line}\n" for _ in range(rounds) for line in order.sample(lines, len(lines)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="text file to write")
    parser.parse_args().file.write_text(text())
