# SPDX-License-Identifier: MIT
"""Prompts to learn from: plain text, and text with facts in it that questions at the end ask for.

Plain text alone teaches a router where language models look when they go on; questions teach it what a look back from far
away asks for. Facts and questions are drawn from lists, so a router cannot know them by heart.
"""

import numpy as np

PEOPLE = ("Agnes", "Bertram", "Celia", "Dimitri", "Edith", "Farid", "Greta", "Hamid", "Ines", "Jonas", "Katya", "Lionel", "Mona",
          "Nadia", "Oskar", "Petra", "Quentin", "Rosa", "Selma", "Tariq", "Ursula", "Viktor", "Wanda", "Yusuf", "Zelda")
THINGS = ("bicycle", "boat", "cupboard", "lantern", "ledger", "locker", "parcel", "piano", "suitcase", "telescope", "trunk", "violin")
COLOURS = ("amber", "black", "blue", "crimson", "green", "grey", "ivory", "orange", "purple", "silver", "white", "yellow")
TOWNS = ("Aberdeen", "Bergen", "Cadiz", "Dresden", "Esbjerg", "Florence", "Ghent", "Halifax", "Innsbruck", "Kiel", "Lisbon", "Malmo",
         "Nantes", "Odessa", "Porto", "Riga", "Seville", "Tallinn", "Utrecht", "Verona")
# (sentence, question, beginning of the answer that the model is shown)
FACTS = (
    ("{who}'s {colour} {thing} has the number {number}.", "What is the number of {who}'s {colour} {thing}?",
     "The number of {who}'s {colour} {thing} is {number}."),
    ("The {colour} {thing} was sent to {who} in {town}.", "Where was the {colour} {thing} sent?",
     "The {colour} {thing} was sent to {who} in {town}."),
    ("{who} moved to {town} in the year {year}.", "When did {who} move to {town}?", "{who} moved to {town} in the year {year}."),
    ("To open the {thing} in {town} you need the code {number}.", "Which code opens the {thing} in {town}?",
     "The code that opens the {thing} in {town} is {number}."),
    ("{who} paid {number} crowns for the {thing} from {town}.", "How many crowns did {who} pay for the {thing}?",
     "{who} paid {number} crowns for the {thing}."),
    ("The best friend of {who} is called {other} and keeps a {colour} {thing}.", "Who is the best friend of {who}?",
     "The best friend of {who} is {other}."),
)


def draw_fact(rng):
    template = FACTS[rng.integers(len(FACTS))]
    who, other = rng.choice(PEOPLE, 2, replace=False)
    words = dict(who=who, other=other, thing=rng.choice(THINGS), colour=rng.choice(COLOURS), town=rng.choice(TOWNS),
                 number="".join(str(d) for d in rng.integers(0, 10, rng.integers(3, 8))), year=rng.integers(1800, 2000))
    return tuple(part.format(**words) for part in template)


def plain(tokens, text, length, rng):
    """`length` token ids of `text`, from a paragraph drawn at random on."""
    parts = text.split("\n\n")
    # Characters per token are below 8 in every text that we know; the check below says if not.
    need = 8 * length
    sizes = np.cumsum([len(p) + 2 for p in parts])
    last = int(np.searchsorted(sizes, max(1, sizes[-1] - need)))
    begin = int(rng.integers(0, last + 1))
    taken = "\n\n".join(parts[begin:])[:need]
    ids = tokens.encode(taken)
    if len(ids) < length:
        raise ValueError("a text of %d characters gives %d tokens, %d are needed" % (len(taken), len(ids), length))
    return ids[:length]


def with_questions(tokens, text, length, rng, facts=8):
    """A chat of `length` ids: text with facts between its paragraphs, then questions about them with answers."""
    drawn = [draw_fact(rng) for _ in range(facts)]
    asked = "".join(tokens.chat_ask(question) + answer for _, question, answer in (drawn[i] for i in rng.permutation(facts)))
    tail = tokens.encode(asked)
    room = length - len(tail) - len(tokens.encode(tokens.chat_start(""))) - sum(len(tokens.encode(" " + f[0])) + 2 for f in drawn)
    if room < length // 2:
        raise ValueError("%d tokens are too few for %d facts" % (length, facts))
    sentences = tokens.decode(plain(tokens, text, room, rng)).replace("\n\n", "\n").split(". ")
    places = np.sort(rng.choice(len(sentences) - 1, facts, replace=False))
    for place, (fact, _, _) in reversed(list(zip(places, drawn))):
        sentences.insert(int(place) + 1, fact[:-1])
    ids = tokens.encode(tokens.chat_start(". ".join(sentences))) + tail
    return ids[-length:] if len(ids) > length else ids
