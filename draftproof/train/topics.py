"""Words for chat-like training prompts, written for this project: subjects, and ways to ask about them."""

from __future__ import annotations


def items(text: str) -> tuple[str, ...]:
    """The comma-separated parts of a text that may run over several lines."""
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


STEM = items("""
gravity, photosynthesis, the water cycle, black holes, plate tectonics, vaccines, antibiotics, DNA
replication, evolution, the periodic table, chemical bonds, acids and bases, electric current, magnetism,
semiconductors, lasers, radioactivity, nuclear fusion, the greenhouse effect, ocean currents, tides,
earthquakes, volcanoes, lightning, rainbows, the seasons, eclipses, the Big Bang, dark matter, relativity,
quantum entanglement, the speed of light, sound waves, friction, momentum, entropy, heat transfer,
buoyancy, the human heart, the immune system, the nervous system, digestion, sleep, memory, hormones,
bacteria, viruses, fungi, pollination, food chains, coral reefs, bird migration, camouflage, hibernation,
dinosaurs, fossils, stem cells, gene editing, proteins, enzymes, osmosis, crystals, steel, plastics,
batteries, solar panels, wind turbines, hydropower, nuclear reactors, combustion engines, jet engines,
rockets, satellites, GPS, radio, microscopes, telescopes, MRI scanners, prime numbers, fractions,
percentages, probability, averages and medians, the Pythagorean theorem, derivatives, integrals, matrices,
vectors, logarithms, exponential growth, complex numbers, set theory, infinity, game theory, fractals,
statistics and sampling, correlation and causation, the scientific method, soil erosion, glaciers,
deserts, rainforests, mosquitoes, honeybees, octopuses, whales, sharks, bats, penguins, mushrooms, trees
in winter, yeast and bread, soap, rust, glass, concrete, ice floating on water, why leaves change colour,
static electricity, optical illusions, allergies, vitamins
""")

COMPUTING = items("""
recursion, binary search, sorting algorithms, hash tables, linked lists, stacks and queues, binary trees,
graphs, dynamic programming, big O notation, pointers, garbage collection, object-oriented programming,
functional programming, closures, decorators in Python, generators in Python, list comprehensions,
exceptions, unit testing, version control, continuous integration, regular expressions, databases, SQL
joins, indexes in databases, transactions, caching, REST APIs, HTTP, DNS, TCP and UDP, encryption, public
keys, hashing passwords, operating systems, threads and processes, deadlocks, virtual memory, file
systems, compilers, interpreters, type systems, machine learning, neural networks, decision trees,
overfitting, gradient descent, language models, attention in transformers, computer vision, recommendation
systems, search engines, load balancers, containers, cloud computing, web browsers, cookies on websites,
JSON, CSV files, Unicode, floating point numbers, random number generators, compression, images and
pixels, spreadsheets, robots, sensors, smart homes, open source licences, debugging, code review,
refactoring, logging, message queues, microservices, event loops, WebSockets, bloom filters, tries, heaps
""")

HUMANITIES = items("""
the Roman Empire, ancient Egypt, the Silk Road, the Renaissance, the Industrial Revolution, the French
Revolution, the Cold War, the printing press, the Black Death, the Vikings, the Mongol Empire, the Ottoman
Empire, the Inca, the Maya calendar, feudalism, colonialism, the abolition of slavery, women's suffrage,
the civil rights movement, the space race, the fall of the Berlin Wall, democracy, constitutions, the
separation of powers, human rights, the United Nations, free trade, inflation, unemployment, supply and
demand, monopolies, taxes, interest rates, stock markets, central banks, microcredit, globalisation,
urbanisation, migration, public transport, education systems, journalism, propaganda, advertising, social
media, privacy, censorship, justice, free will, utilitarianism, stoicism, existentialism, the trolley
problem, the meaning of happiness, friendship, courage, forgiveness, envy, ambition, tradition, myths,
fairy tales, epic poems, haiku, tragedy and comedy, novels, biographies, translation, dictionaries, the
origin of writing, dialects, body language, architecture of cathedrals, impressionism, cubism,
photography, cinema, jazz, opera, folk music, symphonies, dance, theatre masks, pottery, weaving,
calligraphy, museums, archaeology, maps, calendars, money, coins, the Olympic Games, chess, football,
cooking traditions, tea ceremonies, festivals of light, harvest festivals, weddings, funerals
""")

DAILY = items("""
learning to cook, baking bread, growing tomatoes, keeping a garden, composting, houseplants, adopting a
dog, training a puppy, keeping bees, a city balcony, moving house, renting a flat, painting a room, fixing
a bicycle, changing a tyre, packing a suitcase, planning a road trip, a weekend in the mountains, camping
in the rain, a train journey, a day at the beach, visiting a museum, learning a language, learning the
guitar, learning to swim, running a first marathon, yoga at home, healthy breakfasts, vegetarian dinners,
meal planning, saving money, making a budget, buying a used car, a job interview, a first day at work,
working from home, giving feedback, running a meeting, writing a report, public speaking, time management,
procrastination, studying for exams, choosing a university, teamwork, making friends in a new city, a
birthday party, a school reunion, a wedding speech, babysitting, bedtime stories, helping children read,
screen time, grandparents, neighbours, volunteering, a community garden, a flea market, recycling, saving
water, saving energy at home, cycling to work, insomnia, stress, a cold, first aid, sunburn, back pain,
glasses, a broken phone, choosing a laptop, strong passwords, online shopping, spam messages, taking
better photos, knitting, woodwork, board games, crossword puzzles, reading more books, keeping a diary,
stargazing, birdwatching, fishing, skating, surfing
""")

CHARACTERS = items("""
a lighthouse keeper, a retired detective, a talking fox, a young inventor, a nervous dragon, a time
traveller, a ship's cook, a robot gardener, a village baker, a lost astronaut, a clumsy wizard, a stray
cat, an old clockmaker, a desert nomad, a jazz pianist, a deep-sea diver, a mountain guide, a forgetful
king, a brave mouse, a night-shift nurse, a street musician, a park ranger, a librarian with a secret, a
beekeeper, a chess champion, a pirate captain, a school janitor, a weather forecaster, a ghost, a market
seller, a pilot in a storm, a toymaker, a glassblower, a train conductor, a painter who lost her colours,
a farmer, a snow leopard, a pair of twins, a letter carrier, a translator, a taxi driver, a volcano
scientist, a puppet, a gardener
""")

PERSONAS = items("""
a patient teacher, a friendly doctor, a strict editor, a travel guide, a stand-up comedian, a medieval
knight, a science journalist, a football coach, a software engineer, a chef, a philosopher, a history
professor, a nature documentary narrator, a job interviewer, a financial adviser, a detective, a museum
guide, a poet, a weather presenter, a ship captain, a librarian, a mechanic, a lawyer who speaks plainly,
a grandmother, a chess tutor, a gardener, a fitness trainer, a robot from the future
""")

ASK_KNOWLEDGE = (
    "Explain {t} in simple terms.",
    "Explain {t} to a ten-year-old.",
    "What is the most important thing to know about {t}?",
    "Write a short introduction to {t} for a textbook.",
    "Give me five facts about {t}.",
    "How would you teach {t} to a beginner? Give a lesson outline.",
    "What are common misconceptions about {t}?",
    "Describe {t} and give two examples from everyday life.",
    "Compare {t} with {u}. What do they have in common, and where do they differ?",
    "Why does {t} matter? Answer in one paragraph.",
    "Summarise {t} in three bullet points.",
    "I have an exam about {t} tomorrow. What should I revise?",
    "Write three quiz questions about {t}, with answers.",
    "What questions about {t} are still open?",
    "Tell me how {t} was discovered or developed.",
    "Explain {t} step by step, and end with a one-sentence summary.",
    "What would the world look like without {t}?",
    "Use an analogy to explain {t}.",
    "Define {t} and list the key terms one needs to understand it.",
    "Can you explain the connection between {t} and {u}?",
    "What are the advantages and disadvantages of {t}?",
    "Write a dialogue between a teacher and a student about {t}.",
    "What is {t}?",
    "How does {t} work?",
    "Make a table with the main ideas of {t} and a short explanation of each.",
)

ASK_CODING = (
    "Explain {t} with a short Python example.",
    "When should I use {t}, and when not?",
    "Write a small program that demonstrates {t}. Comment each step.",
    "What mistakes do beginners make with {t}?",
    "Compare {t} and {u} from a programmer's point of view.",
    "I am preparing for an interview. Ask me a question about {t} and give a model answer.",
    "Explain {t} to somebody who has never programmed.",
    "Describe the time and memory costs connected with {t}.",
    "Write a Python class related to {t} with three useful methods.",
    "Give a checklist for working with {t} in a real project.",
    "What is {t} and why do we need it?",
    "Show pseudocode that has to do with {t}, then translate it to Python.",
    "Write a README section that introduces {t}.",
    "How would you test code that relies on {t}?",
)

ASK_HUMANITIES = (
    "Write a short essay on {t}.",
    "What caused {t}, or what shaped it? Name three factors.",
    "Discuss {t} from two opposing points of view.",
    "How has the view of {t} changed over time?",
    "What can we learn from {t} today?",
    "Describe the influence of {t} on everyday life.",
    "Compare {t} and {u} in a few paragraphs.",
    "Write an opening paragraph for an article about {t}.",
    "Give an overview of {t} with a short timeline.",
    "What would a critic say about {t}, and how could one reply?",
    "Explain {t} to a visitor from another planet.",
    "Suggest three research questions about {t}.",
    "Name important people connected with {t} and say what they did.",
    "What is {t}?",
)

ASK_DAILY = (
    "Give me practical tips for {t}.",
    "I need help with {t}. Where should I start?",
    "Write a friendly email to a friend about {t}.",
    "Write a checklist for {t}.",
    "Write a blog post about {t} with a catchy title.",
    "What are the pros and cons of {t}?",
    "Make a one-week plan for {t}.",
    "Write a short social media post about {t}.",
    "What could go wrong with {t}, and how can I prevent it?",
    "Draft a polite complaint letter connected with {t}.",
    "Tell me a funny anecdote about {t}.",
    "Give advice on {t} to somebody with very little time.",
    "Write a product review that has to do with {t}.",
    "List ten ideas for {t}.",
    "How do I talk about {t} with my family?",
    "Write an invitation connected with {t}.",
    "Persuade me to care about {t}.",
    "Describe a typical day that involves {t}.",
)

ASK_WRITING = (
    "Write a short story about {c}.",
    "Write a short story in which {c} meets {d}.",
    "Write a poem about {c}.",
    "Write the opening scene of a novel about {c}.",
    "Describe {c} in one vivid paragraph.",
    "Write a dialogue between {c} and {d} about {t}.",
    "Continue this story: One morning, {c} found a letter about {t}.",
    "Write a diary entry by {c}.",
    "Write a bedtime story about {c} and {t}.",
    "Write a limerick about {c}.",
    "Invent a legend that explains {t}, with {c} as its hero.",
    "Write a news report: {c} and {d} cause a stir in a small town.",
    "Outline a film about {c} in three acts.",
    "Write a speech that {c} gives about {t}.",
    "Write a haiku about {t}.",
    "Write a song lyric about {t}.",
)

ASK_ROLEPLAY = (
    "You are {p}. Explain {t} to me.",
    "Act as {p} and answer my question: what should everyone know about {t}?",
    "Pretend to be {p}. Give me advice on {t}.",
    "Imagine you are {p} who has just heard about {t} for the first time. How do you react?",
    "Take the role of {p} and interview me about {t}. Begin with your first three questions.",
    "Stay in character as {p}: describe your typical day and mention {t}.",
    "As {p}, write a short letter to your younger self about {t}.",
)

STYLES = (
    "",
    "",
    "",
    "",
    "",
    " Keep it under 100 words.",
    " Use a friendly tone.",
    " Use a formal tone.",
    " Answer in two paragraphs.",
    " Use bullet points.",
    " Give an example.",
    " Be concise.",
    " Write about 200 words.",
    " Add a title.",
    " Avoid technical words.",
    " End with a question to the reader.",
)
