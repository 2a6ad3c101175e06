"""Word problems and extraction tasks with random names and numbers, written for this project.

They stand in for reasoning-gym's `gsm_symbolic`, whose templates are questions of the GSM8K test set:
training on them would spoil GSM8K as a measurement.
"""

from __future__ import annotations

from random import Random

from draftproof.train.topics import items

NAMES = items("""
Amara, Ben, Carla, Dmitri, Elena, Farid, Grace, Hiro, Ines, Jonas, Kavya, Liam, Mei, Noor, Oscar, Priya,
Quentin, Rosa, Samir, Tara, Uma, Viktor, Wanda, Ximena, Yusuf, Zoe, Anton, Bella, Chidi, Dora, Emil,
Fatima, Goran, Hana, Ivan, Julia, Kofi, Leila
""")
THINGS = items("""
apples, books, stamps, marbles, tickets, pencils, cookies, shells, cards, bricks, candles, seeds,
postcards, buttons, badges, balloons, chairs, tiles, lamps, bottles, eggs, tulips, stickers, coins,
puzzles, scarves, mugs, ribbons, plates, bolts
""")
PLACES = items("""
school, bakery, library, farm, factory, museum, market, harbour, workshop, theatre, garden centre, post
office, zoo, hotel, bookshop, swimming pool, warehouse, clinic, cinema, garage
""")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# {s} {r} 2-9, {m} {n} 10-40, {b} 60-400, {p} percent, {d} {e} dollars, {x} {y} {z} names, {t} {u} {v} things
WORD_PROBLEMS = (
    "{x} packs {t} into boxes of {s}. There are {b} {t}. How many full boxes are there, and how many "
    "{t} are left over?",
    "The {place} sells {t} at ${d} each. {x} buys {m} of them with a {p}% discount. How much does {x} pay?",
    "{x} saves ${m} every week and spends ${s} of it on {t}. How much is saved after {n} weeks?",
    "A tank holds {b} litres. It loses {s} litres an hour and is refilled by {m} litres each evening "
    "at six. Starting full, how much is in it after two days?",
    "{x} cycles {m} kilometres in {s} hours. At the same speed, how long does a trip of {b} kilometres take?",
    "{x} has {m} {t} and {y} has {n} more than twice as many. How many {t} do they have together?",
    "On {day} the {place} had {b} visitors. The next day there were {p}% more. How many came on both days together?",
    "A rectangle is {m} metres long and {s} metres narrower than it is long. What are its area and perimeter?",
    "{x} reads {m} pages on {day} and each following day {s} pages more than on the day before. How "
    "many pages is that in a week?",
    "Three friends share {b} {t} in the ratio {s}:{r}:1. How many does each of them get?",
    "A recipe for {s} people needs {b} grams of flour. How much flour is needed for {m} people?",
    "{x} earns ${d} an hour and works {m} hours a week. After a raise of {p}%, what is the weekly pay?",
    "A bus leaves the {place} with {m} passengers. At the first stop {s} get off and {n} get on; at "
    "the second stop half of all passengers get off. How many are left?",
    "{x} is {m} years old. In {s} years {x} will be twice as old as {y} is then. How old is {y} now?",
    "Two trains are {b} kilometres apart and move towards each other at {m} and {n} kilometres an "
    "hour. When do they meet?",
    "The {place} ordered {s} crates with {m} {t} each. {r} {t} in each crate were broken. How many whole {t} arrived?",
    "The mean of {s} numbers is {m}. One more number, {n}, is added. What is the new mean?",
    "A shirt costs ${b}. Its price first rises by {p}% and then falls by {p}%. What does it cost in the end?",
    "{x} plants {s} rows of {m} tulips. {p}% of them do not come up. How many flowers bloom?",
    "A phone plan costs ${m} a month plus ${s} for each extra gigabyte. {x} paid ${b} in one month. "
    "How many extra gigabytes were used?",
    "{x} walks {s} kilometres to the {place}, waits {m} minutes and takes a bus for {n} minutes. "
    "Walking one kilometre takes 12 minutes. How long is the whole way?",
    "A jar holds {m} red, {n} blue and {s} green marbles. What is the probability of drawing a blue one?",
    "{x} and {y} paint a fence. Alone {x} needs {s} hours and {y} needs {r} hours. How long do they need together?",
    "{x} has ${b}. A third is spent on {t}, then ${m} on {u}. How much money is left?",
    "The sum of two numbers is {b} and their difference is {m}. What are the numbers?",
    "A printer makes {m} pages a minute. {x} prints {b} pages, but has to wait {s} minutes for new "
    "paper halfway. How long does it take in all?",
    "In a class of {m} pupils, {s} play chess, {r} play the piano and 2 do both. How many do neither?",
    "{x} buys {s} packs of {t} for ${d} each and sells each pack for ${e}. What is the profit, or the loss?",
    "A clock loses {s} minutes a day. It is set right on {day} at noon. What does it show after {m} days at noon?",
    "If {s} machines make {b} {t} in an hour, how many {t} do {r} machines make in {m} hours?",
    "{x} runs every day, {s} kilometres on workdays and {m} kilometres on each day of the weekend. How "
    "far is that in four weeks?",
    "A square garden has a fence of {b} metres around it. What is its area?",
    "{x} scored {m}, {n} and {b} points in three games. How many points are needed in the fourth game "
    "for a mean of 80?",
    "From {b} {t}, {x} gives {p}% to {y}, and {y} gives a quarter of those to a friend. How many does {y} keep?",
    "A car uses {s} litres of fuel for 100 kilometres, and a litre costs $2. What does a trip of {b} kilometres cost?",
    "Today is {day}. Which day of the week will it be in {b} days?",
)

ENDINGS = (
    "",
    "",
    "",
    " Show your working.",
    " Think step by step.",
    " Explain your answer.",
    " Give the answer at the end.",
)

RECORDS = (
    "Extract the name, the amount and the date as JSON: On {day}, {x} paid ${b} for {m} {t} at the {place}.",
    "List every person named in this text: {x} met {y} at the {place} on {day}, where {z} was selling {t}.",
    "Turn this into a table with the columns who, what and how many: {x} brought {m} {t}, {y} brought "
    "{n} {u}, and {z} brought {s} {t}.",
    "Answer from the text only. Text: The {place} opens at {s} on weekdays and at {m} on {day}; {x} "
    "keeps the key, and {y} counts the {t}. Question: who counts the {t}?",
    'Is the following review positive or negative, and why? "I ordered {m} {t} for ${b} at the '
    '{place}. {s} of them were broken, but {x} replaced them within a day."',
    "Rewrite this note as a polite email: {x}, need {m} {t} by {day}, {y} says the {place} only has {s}, please call.",
    "Sort these by number, largest first, and give the total: {x} {m}, {y} {n}, {z} {b}.",
    "Summarise in one sentence: {x} and {y} opened a stall near the {place}. In the first week they "
    "sold {m} {t}, in the second {b}. {z} now helps them on {day}s, and they plan to sell {u} as well.",
    "Correct the grammar: {x} have went to the {place} on {day} and buyed {m} {t} for he friend {y}.",
    "Write a CSV file with a header for these sales: {day} {m} {t}, ${b}; the day after {n} {u}, ${d}.",
)

LOGIC = (
    "{x} is taller than {y}, and {y} is taller than {z}. Who is the shortest? Explain.",
    "All {t} in the {place} are old. Some old things are valuable. Does it follow that some of the {t} are valuable?",
    "{x}, {y} and {z} sit in a row. {x} is not next to {z}. Who sits in the middle?",
    "{x} says that {y} lies. {y} says that {x} and {z} both lie. Exactly one of the three tells the "
    "truth. Who could it be?",
    "If it rains on {day}, the {place} stays shut. The {place} was open on {day}. What follows about the rain?",
    "You have a {s}-litre and a {r}-litre jug and a tap. Which whole numbers of litres can you measure? Explain.",
    "A drawer holds {m} black and {n} white socks. How many must {x} take in the dark to be sure of a pair?",
    "{x} finished before {y} but after {z}. Somebody finished after {y}. Give the order of all of them.",
    "Which of these does not belong: {t}, {u}, the colour blue, {v}? Give your reason.",
    "How many times do the hands of a clock overlap between {s} in the morning and {s} in the evening? Explain.",
)


def fill(template: str, rng: Random) -> str:
    """The template with its slots drawn from `rng`; names and things within one text differ."""
    names, things = rng.sample(NAMES, 3), rng.sample(THINGS, 3)
    small = rng.sample(range(2, 10), 2)
    price = rng.randint(2, 30)
    return template.format(
        **dict(zip("xyz", names, strict=True)),
        **dict(zip("tuv", things, strict=True)),
        s=small[0],
        r=small[1],
        m=rng.randint(10, 40),
        n=rng.randint(10, 40),
        b=rng.randint(12, 80) * 5,
        p=rng.choice((5, 10, 15, 20, 25, 30, 40, 50)),
        d=price,
        e=price + rng.randint(1, 9),
        place=rng.choice(PLACES),
        day=rng.choice(DAYS),
    )


def word_problem(rng: Random) -> str:
    return fill(rng.choice(WORD_PROBLEMS), rng) + rng.choice(ENDINGS)


def logic_puzzle(rng: Random) -> str:
    return fill(rng.choice(LOGIC), rng)


def extraction_task(rng: Random) -> str:
    return fill(rng.choice(RECORDS), rng)


# Small functions over a list, put together from parts: name, words
PICKS = (
    ("even", "the even numbers"),
    ("odd", "the odd numbers"),
    ("positive", "the positive numbers"),
    ("negative", "the negative numbers"),
    ("large", "the numbers greater than {m}"),
    ("small", "the numbers below {n}"),
    ("multiples", "the multiples of {s}"),
    ("unique", "the numbers that occur exactly once"),
    ("repeated", "the numbers that occur at least twice"),
    ("two_digit", "the numbers with exactly two digits"),
    ("at_even_index", "the numbers at even positions"),
    ("rising", "the numbers that are greater than the one before them"),
    ("outer", "the first {s} and the last {s} numbers"),
    ("short", "the numbers with fewer than {s} digits"),
)
DOINGS = (
    ("sum", "int", "the sum of {pick}"),
    ("count", "int", "how many of {pick} there are"),
    ("max", "int", "the largest of {pick}, or 0 if there are none"),
    ("min", "int", "the smallest of {pick}, or 0 if there are none"),
    ("mean", "float", "the mean of {pick}, or 0.0 if there are none"),
    ("sorted", "list[int]", "{pick}, sorted in descending order"),
    ("reversed", "list[int]", "{pick} in reverse order"),
    ("squares", "list[int]", "the squares of {pick}"),
    ("without", "list[int]", "the list without {pick}"),
    ("doubled", "list[int]", "the whole list with {pick} doubled"),
    ("positions", "list[int]", "the positions of {pick}"),
    ("groups", "dict[int, int]", "a dictionary from each of {pick} to the number of times it occurs"),
    ("spread", "int", "the difference between the largest and the smallest of {pick}"),
    ("running", "list[int]", "the running totals of {pick}"),
    ("joined", "str", "a string of {pick} joined by dashes"),
    ("digits", "int", "the sum of the digits of {pick}"),
)
ASKS = (
    "Complete the following Python function.\n```python\ndef {name}(numbers: list[int]) -> "
    '{kind}:\n    """ Return {what}.\n    """\n```',
    'def {name}(numbers: list[int]) -> {kind}:\n    """Return {what}."""\n',
    "Write a Python function `{name}(numbers)` that returns {what}.",
    "Write a function in {language} that takes a list of whole numbers and returns {what}.",
    "Given a list of integers, how do I get {what} in Python? Explain the code.",
    "Write a Python function that returns {what} for a list of integers, and three tests for it.",
)
LANGUAGES = ("Python", "JavaScript", "C++", "Java", "Go", "Rust", "C", "Ruby")


def small_function(rng: Random) -> str:
    """A coding task over a list of numbers, with parts drawn from `rng`."""
    (pick, words), (doing, kind, what) = rng.choice(PICKS), rng.choice(DOINGS)
    sentence = fill(what.format(pick=words), rng)
    return rng.choice(ASKS).format(name=f"{doing}_{pick}", kind=kind, what=sentence, language=rng.choice(LANGUAGES))
