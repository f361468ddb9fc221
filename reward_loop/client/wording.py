"""Words and patterns that the rules of `reward_loop.client.verdict_grammar` look for around a verdict.

Most are English; other languages have the most frequent words. No pattern can backtrack over more than a bounded number
of characters.
"""

from __future__ import annotations

import re


def _any_case(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HEDGES = _words(
    "or to if unless but not no nor maybe perhaps possibly probably likely at about around approx approximately "
    "roughly nearly almost would could should might may than per percent percentage cent times minus plus half "
    "hundred thousand million initially initial first tentative tentatively provisional provisionally draft "
    "guess before until versus vs however except assuming depending between higher lower more less fewer up "
    "down wait actually rather instead though otherwise is was were seems isn wasn partially partly mostly "
    "largely somewhat borderline ish out of off deducted lost below above apart part max maximum tops min "
    "minimum example placeholder illustration uncertain unsure pending means requires provided subject when "
    "oder aber vielleicht wenn falls etwa teilweise bis ou mais peut environ partiellement pero quiz\u00e1 "
    "quiz\u00e1s talvez parcialmente \u0438\u043b\u0438 \u043d\u043e "
    "\u0432\u043e\u0437\u043c\u043e\u0436\u043d\u043e"
)
"""Words that qualify a value, or make it the subject of a sentence, if they are among the first two after it."""
PROSE = _words("to but not no is was than more less lower higher first half out up down should instead")
"""Those of them that do not qualify it as the second word after a comma, a bracket or a dash."""
PARTIAL = _words("part partially partly partial mostly largely half somewhat incomplete")
"""Words that qualify only a word with the highest or the lowest score."""
FAULTLESS = _any_case(
    r"\b(?:no|without|free of|not)\s(?:any\s|an?\s)?(?:\w{1,12}\s)?"
    r"(?:errors?|mistakes?|issues?|problems?|flaws?|gaps?|doubts?|objections?|faults?|defects?|reservations?"
    r"|contradictions?|violations?|discrepanc(?:y|ies)|inconsistenc(?:y|ies)|inaccurac(?:y|ies)|omissions?)\b"
)
"""It does not qualify a value, although it has words that do."""
CONCEDED = _any_case(
    r"\A\W*(?:(?:but|although|(?:even )?though|despite|while)\s(?:the|its|most|some|all|many)\s(?:\w{1,12}\s)?"
    r"(?:method|approach|reasoning|set-?up|steps?|working|logic|idea|calculations?|explanation|formula)\s"
    r"(?:is|are|was|were|seems?|looks?)\s(?:correct|right|sound|valid|good|fine|reasonable|clear)\b"
    r"|not\s(?:equal|equivalent|the same|a match|supported|met|satisfied)\b"
    r"|no (?:credit|points?|marks?|(?:final |valid )answer(?: (?:was|is) (?:given|provided))?)\b"
    r"|\d{1,4} (?:of|out of) \d{1,4} \w{1,20} (?:pass(?:ed)?|are right|are correct)\b)"
)
"""What may be said of an answer with the lowest score, and does not qualify it."""
_FLAWS = r"(?:(?:errors?|mistakes?|typos?|issues?|gaps?|flaws?|slips?|problems?)\b)"
_PARTS = (
    r"(?:(?:steps?|sections?|parts?|paragraphs?|lines?|sentences?|examples?|cases?|sources?|facts?|criteria|claims?)\b)"
)
REMARK = _any_case(
    rf"\b{_FLAWS}\s(?:in|at)\s{_PARTS}\s\d{{1,3}}(?:\sand\s\d{{1,3}})?(?=\s*(?:[.,;)]|\Z))"
    r"|(?<![+*/=\u2012-]\s)(?<![\d.:=/+*\u2012-])\b\d{1,3}\s"
    rf"(?:(?:(?:minor|small|factual|major)\s)?{_FLAWS}|more\s{_PARTS}|of\s(?:the\s)?\d{{1,3}}\s(?:key\s)?{_PARTS})"
    r"|\A\W{1,3}which (?:is|was) (?:an? )?(?:very |quite )?(?:good|solid|strong|fair|excellent|decent|acceptable)"
    r"(?: (?:answer|response|result|score))?(?=\s*(?:[.,;:!)]|\Z))"
)
"""A remark after a number that does not qualify it, although it has words or numbers that do."""
DEGREE = _any_case(
    r"\b(?:mostly|largely|partially|partly|somewhat|nearly|almost|not (?:fully|entirely|completely|quite))\s"
    r"(?:correct|right|accurate|complete|helpful|relevant|clear|good|solid|perfect|incorrect|wrong|consistent"
    r"|faithful|coherent|excellent|sound|valid|useful|there)\b|\b(?:above|below) average\b"
)
"""What is said of an answer with a number between the lowest and the highest."""
FLAW = _any_case(
    r"\A[\s,;(\u2012-]{1,4}(?:but|however,?|(?:al|even )?though|yet)\s"
    r"(?!.*(?:\d|\b(?:lower|higher|less|scores?|ratings?|grades?|marks?|verdict|judge\w*|numbers?|maybe|perhaps|should|would|might|if|unless|sure|unsure)\b))"
    r"(?:(?:it|there|(?:the|its|some)(?:\s\w{1,15}){1,3})\s)?"
    r"(?:(?:lacks?|lacking|misses|missing|omits|needs)\b|could (?:be (?:\w{1,12}er|improved|more \w{1,15}|expanded)"
    r"|use|include|have (?:used|included|cited|mentioned|explained|been (?:clearer|shorter|longer|more \w{1,15})))\b"
    r"|(?:is|are)\s(?:(?:a (?:bit|little)|rather|somewhat|slightly|quite|too|still|also|only)\s)?(?:short|brief|long"
    r"|verbose|wordy|terse|formal|informal|unclear|vague|shallow|dense|thin|weak|missing|incomplete|repetitive|abrupt"
    r"|room for|minor|small|some))"
)
"""The beginning of a clause after a number that only names a flaw of the answer."""
STYLE = _any_case(
    r"\A[\s,;(\u2012-]{1,4}(?:but|(?:al|even )?though)\s(?:its|the)\s(?:explanation|wording|presentation|formatting"
    r"|layout|notation|style|grammar|prose|write-?up)\s(?:could be (?:better|clearer|improved|longer|shorter"
    r"|more (?:clear|concise|detailed|explicit|precise|readable|structured|thorough))"
    r"|is (?:(?:a (?:bit|little)|rather|somewhat|slightly|quite) )?(?:short|brief|long|verbose|wordy|terse|informal))"
    r"\W*\Z"
)
"""A whole clause after a word that only names a flaw of how the answer is written."""
HARMLESS = _any_case(
    r"\s++(?:(?:and\s(?:complete|concise|clear|well|fully|consistent|valid|accurate|right|precise|equivalent"
    r"|matches|wrong"
    r"|false|invalid|incomplete|unclear|misleading|unsupported|inconsistent)"
    r"|with\shigh\s(?:confidence|certainty)|as\s\d{1,9}(?=\s(?:=|\u2260|is|equals|matches|does))"
    r"|as\s(?:stated|given|shown|required|expected|written|the|it|this|both|all|is|there|they|every)"
    r"|with\s(?:the(?!\s(?:exception|caveat))|all|both|every|full|clear|its)|(?:in|for|on)\s(?:all|both|every"
    r"|each|full|any))\b"
    r"|overall|throughout|indeed|here|according to|without (?:any )?doubt"
    r"|(?:given|per|based on) the (?:reference|rubric|ground truth|criteria)(?: answer| solution)?(?=\W*\Z)"
    r"|(?:(?:final|numerical|exact)\s)?(?:answer|solution|response|result|meaning)\b)"
)
"""What may follow a word directly, without a sign between them, and does not qualify it."""
PREFERRED = (
    r"|\A\s(?:wins|is (?:the )?(?:clearly |slightly |much )?(?:better|best|stronger|superior|winner)"
    r"(?: (?:answer|response|option|one|solution))?(?: than (?:(?:answer|response|assistant) )?(?:%s))?)"
    r"(?=\W*\Z|,?\s(?:because|since|as|due)\b)"
)
"""What may be said of the better one of two answers, directly after its letter."""
DIRECT = re.compile(r"\s*[^\W\d_]")
RESERVATIONS = _any_case(
    r"\W*(?:only|yet|albeit|although|despite|just|barely|hardly|(?:in|with)\s(?:a|an|one|some|most|part"
    r"|principle|spirit|theory|essence"
    r"|form|minor|small|few|several|reservations?|caveats?|exceptions?|errors?)\b|aside|save for|modulo"
    r"|as (?:far|long)"
    r"|under|kind of|sort of|i (?:think|guess|believe|suppose|assume)|at first|numerically|incomplete"
    r"|conditionally|close|unverified|presumably|apparently|supposedly|with the exception|nur\b|seulement)"
)
"""The beginning of a clause after a word that qualifies it."""
AGAINST = _words(
    "wrong incorrect false invalid inaccurate flawed mistaken erroneous incomplete unequal bad failed fails "
    "untrue insufficient inconsistent unacceptable contradicts differs lacks different falsch faux incorrecto "
    "errado"
)
"""Words that judge an answer to be wrong."""
FOR = _words("right correct true valid accurate good fine passed sound acceptable same equal identical")
"""Words that judge an answer to be right."""
CJK_HEDGE = re.compile(
    r"\W*(?:\u6216|\u5927\u6982|\u5927\u7ea6|\u7ea6|\u5de6\u53f3|\u53ef\u80fd|\u4e5f\u8bb8|\u4f46|\u5982\u679c"
    r"|\u5230|\u81f3|\u4e0d|\u51e0|\u8d77|\u4ee5|\u304b|\u307e\u305f|\u304f\u3089\u3044|\u7a0b\u5ea6)"
)
"""Such words of Chinese and Japanese, which have no spaces: or, about, perhaps, but, if, to, not."""
POINTS = re.compile(r"\s?(?:\u5206|\u70b9|\uc810)(?![^\W\d_])")
"""The unit of a score in Chinese, Japanese and Korean."""
DOUBTED = frozenset("?\u061f\u203d\u2047\u2048\u2049\u2753\u2754\U0001f914")
"""Signs in the clause of a value that qualify it; a cross does, too, if its score is not the lowest."""
REASON = _any_case(r"[\s,;:(\u2012-]{1,5}(?:because|since|due\s+to|given\s+that)\b")
TAKEN_BACK = _any_case(
    r"(?:[.!?\n]|\A)[\s*_>(-]{0,9}+(?:(?:oh|well|but|however|though|still|that said)[,.]?\s)?"
    r"(?:(?:no )?wait|hold on|hmm+|oops|sorry|correction|scratch that|alternatively,? \d|on second thoughts?"
    r"|actually|rather|not really[.!]"
    r"|maybe|perhaps|or\b|no[,.:;!\u2012-]|let me re|i take (?:it|that|this) back|edit:|just kidding|my mistake"
    r"|(?:up)?on (?:further|reflection|reconsideration|closer|(?:a )?second|re-?reading)|in hindsight"
    r"|after (?:reconsider|further|re-?reading|a second|some)|i(?:'m| am) (?:changing|lowering|raising|revising)"
    r"|(?:changing|lowering|raising|revising) (?:it|my|the|this)|i now (?:think|believe|feel|see)"
    r"|i(?:'d| would) (?:now|lower|raise|change|revise)|let me (?:correct|revise|change|adjust|fix|lower|raise)"
    r"|(?:adjusted|lowered|raised|revised|changed|corrected|reduced) to \d|that should be an? \d"
    r"|an? \d{1,3} (?:would be|is|seems|might be) (?:fairer|better|more|closer)|(?:strike|disregard|ignore) that"
    r"|i (?:(?:would|will|must|should|have to) )?(?:changed my mind|change |lower |raise |reduce |revise |downgrade "
    r"|upgrade |correct )|make (?:that|it) (?:an? )?\d|(?:this|that) (?:is|was) not (?:my|the) final"
    r"|(?:the|this|that|my) (?:above )?(?:score|verdict|rating|grade)(?: above)? (?:is|was|seems) (?:only |just )?"
    r"(?:wrong|too |an? (?:example|placeholder)|not (?:my|the|final|valid)))"
)
ENDS_LINE = re.compile(r"(?:[*_\"'` \t|.!)\]}$\u2019\u201d]|\\[)\]])*+(?:\n|\Z)")
ENDS_SENTENCE = re.compile(r"[ \t]*+(?:\n|\Z)|(?:!++|[.\u3002])(?![.\w?])")
BEGINS_PROSE = re.compile(
    r"(?:\s++(?:[^\W\d]|[,;:(\[|<\u2012*_\"'`.!\u201c\u2300-\U0010ffff]|-\s)|[,;:](?![a-zA-Z\d_])|\u3001|[("
    r"|<\u2012]|(?!\w)[\u2300-\U0010ffff]|-\s)"
)
ENDS = re.compile(r"(?:\s?[\u5206\u70b9\uc810])?(?:[\s*_\"'`.!\u3002)\]}|>~$\u2019\u201d\u00bb\u300d]|\\[)\]])*+\Z")
NEUTRAL = _words(
    "a an and as final give hence i is it my our overall so the then therefore this thus total "
    "\u6700\u7ec8 \u6700\u7d42 \u7efc\u5408 \u7dcf\u5408 \u7d9c\u5408 \u603b \u603b\u4f53"
)
"""Words before a marker that do not give it another meaning."""
DENIALS = _words(
    "not no nor or either neither never maybe perhaps possibly probably likely max maximum min minimum previous "
    "possible threshold passing expected hypothetical reverse reversed perfect ideal preliminary tentative "
    "tentatively provisional baseline guess target human reference lowest highest suggested proposed original "
    "rough approximate estimated initial starting old earlier sample example draft like form default "
    "placeholder dummy imagine label gold"
)
"""Words before a marker that qualify what follows."""
NAMING = DENIALS - {"no", "not", "nor", "or", "either", "neither", "never", "like", "form"}
"""Those of them that do so anywhere in a short name with a colon."""
POSSESSIVE = _any_case(
    r"\b(?!student|model|assistant|response|answer|candidate|author|user|writer|essay|it\b|let\b|here|that|there|what)"
    r"[\w-]{2,20}['\u2019]s\s"
)
NOT_SAID = _any_case(
    r"(?:\b(?:example|template|instance)|\be\.g\.|\bsuch as|(?<!json )(?<!ed )\bformat(?:\s(?:is"
    r"|was))?)[\s:,*_\"'`(]{0,6}\Z"
    r"|(?:<(?:s|del|strike)>|\b(?:not|never|reject(?:ed)?|loser|wors[et])\b)[\s:*_\"'`(]{0,6}\Z"
    r"|\bif\b[^.!?\n]{0,80}\Z"
    r"|(?:n't|n\u2019t|\bnot|\bnever|\bcannot)\s(?:\w{1,20}\s){0,2}(?:write|give|award|assign|say|output|use|deserve)"
    r"[\s:,*_\"'`(an]{0,6}\Z"
)
"""Text before a candidate that makes it an example, a condition, or what the judge does not give."""
OTHERS = re.compile(
    r"\b(?:wrote|writes|written|says|said|states|stated|claims|claimed|quotes|quoted|contains?|contained|includes?"
    r"|asks|demands|wants|requests|instructs|tells|insists|into (?:writing|giving|saying))\b"
    r"(?:[^\S\n][^\s.,;:!?]{1,20}){0,6}?[^\S\n]?(?::\s{0,3}(?:```\w{0,9}\s)?)?[\"'`\u201c>(*_ ]{0,4}\Z"
)
"""Text before a candidate that makes it what somebody else wrote or asks for."""
LEAD_BREAK = re.compile(
    r"[.!?;:\u3002]++(?<!\be\.g\.)(?=[\s*_\"')\]\u2e80-\ufffd]|\Z)|\n(?=\s*\n|[^\S\n]*(?:[-*+#|>]|\d{1,2}[.)])\s)"
)
"""What ends a sentence, also without a full stop, before the sentence that leads to a candidate."""
CONDITION = _any_case(
    r"\W*(?:(?:only|even|but|and|so|then|thus|however|or|also|it)\b,?\s){0,3}"
    r"(?:if|unless|when(?:ever)?(?!\s\w+ing\b)|suppos\w+|assum\w+|provided|in (?:the )?case|should (?:it|the"
    r"|this)|had\b|were\b"
    r"|without(?!\s(?:further|a?\s?doubt|question|hesitation))|otherwise|normally|usually|typically|ideally"
    r"|hypothetically|theoretically|in theory"
    r"|for (?:example|instance|comparison|reference)|e\.?g|wenn|falls|si(?=\s)|\u5982\u679c|\u4f8b\u5982"
    r"|(?:(?:an?|the|here is|here's|this is|one|output|response|answer|expected|required|sample)\s){0,4}"
    r"(?:example|template|format|(?:sample|expected|example)(?:\s(?:output|reply|response|line|result|answer))?)\b"
    r"(?:\s\w+){0,4}\W*\Z)"
)
"""The beginning of a sentence that leads to an example, or to a value under a condition."""
IMAGINED = _any_case(
    r"\W*(?:(?:now|so|first|let(?:['\u2019]s| us| me)|(?:we|you) (?:can|could|may|might)|to calibrate)\b,?\s){0,3}"
    r"(?:consider|imagine|suppose|assume|picture|envision|think of)\s"
    r"(?:that\s)?(?:an?|another|any|some)\b"
)
"""The beginning of a sentence about another answer, which the pronoun of the next sentence stands for."""
PRONOUN = _any_case(r"\W*(?:(?:and|so|then|thus|hence|here)\b,?\s){0,2}(?:it|they|he|she|such an?)\b")
GIVES = _words(
    "get gets getting got gotten receive receives received receiving earn earns earned deserve deserves "
    "deserved merit merits warrant warrants give gives given giving gave assign assigns assigned award awards "
    "awarded grant grants say says said write writes wrote written put puts choose chooses chose pick picks "
    "prefer prefers select selects output outputs produce produces print prints return returns replies rate "
    "rates rated be been is are was were mean means expect expects like read reads end ends lead leads result "
    "results go goes aim aims hope hopes vote votes call calls want wants accept accepts has have had bekommt "
    "erh\u00e4lt verdient obtient re\u00e7oit m\u00e9rite recibe obtiene merece scores worth see sees argue "
    "argues reply respond format"
)
"""Words at the end of a sentence that says who gives or gets the value."""
GIVEN = _words("this that it them him her the a an as at of for with in on to only just about answer most least your")
"""Words that may follow them."""
OWN = _any_case(
    r"(?:\W|\b(?:and|so|but|then|thus|hence|therefore|overall|finally|now|here|since|because|as|while|here's"
    r"|given|no(?!\sone)|is|are)\b){0,9}"
    r"(?:(?:i|we|it|this|that|which|these|my|our|its|no (?!one)\w+|diese[rs]?|das|cette|esta|este)\b"
    r"|(?:the|a fair|an appropriate|a reasonable|a suitable|die|der|la|le"
    r"|el)\s(?:[\w'\u2019]+\s){0,3}?(?:answer|response|solution|submission"
    r"|essay|text|student|assistant|model|candidate|proof|completion|output|summary|translation|code|program"
    r"|score|rating"
    r"|verdict|grade|mark|judge?ment|decision|assessment|evaluation|result|conclusion|winner|choice|ranking|attempt"
    r"|explanation|argument|work|reply|total|sum|average|quality|antwort|r\u00e9ponse|respuesta)\b"
    r"|(?:weigh|combin|averag|add)\w+|(?:the\s)?(?:final|json)\s(?:json\s)?output\W*\Z"
    r"|in\s(?:the|your)\s(?:requested|required|specified|desired)\s(?:json\s)?(?:output\s)?format\W*\Z)|\W*\w+\W*\Z"
)
"""The beginning of the last clause of such a sentence if it is about this answer."""
ALIEN = _any_case(
    r"\b(?:perfect|ideal|flawless|maxim\w+|minim\w+|(?:highest|lowest|best|worst)\s(?:possible|score|rating"
    r"|grade|mark)"
    r"|full marks?|would have|could|might|may|normally|usually|typically|otherwise|generally|another|others?|someone"
    r"|somebody|anyone|people|complete|full|previous|claims?|about to|first (?:instinct|impression|guess"
    r"|thought|inclination|draft)"
    r"|tempted|supposed|told|asked|instructed|almost|nearly|originally|initially|at first"
    r"|hop(?:e[sd]?|ing)|wants?|wanted|humans?|graders?|teachers?|experts?|users?|authors?|reference|expected"
    r"|hypothetical|in theory"
    r"|instructions?|rubric|guidelines?|prompt|last line|was going|cannot|refuse|hesitate|not|never|parfaite|perfekte"
    r"|perfecta)\b"
)
"""What it says if it is about something else, or not decided."""
ALIEN_CJK = re.compile(r"(?:\u5b8c\u7f8e|\u7406\u60f3|\u6ee1\u5206)\u7684?(?:\u56de\u7b54|\u7b54\u6848)")
INLINE_QUOTE = re.compile(r"\w[^\n\"\u201c\u201e\u00ab\u300c]{0,60}[^\w\n][\"\u201c\u201e\u00ab\u300c][*_(]{0,3}\Z")
HIGHER = _any_case(
    r"(?:\b(?:to (?:get|earn|receive|reach|achieve|deserve)|for)\s)?\b(?:an?|any)\s(?:higher\s|perfect\s|full\s)?\Z"
)
MISSED = _any_case(
    r"[*_`\"')\]]{0,4}(?:/\d{1,3})?\s(?:would (?:require|need|have (?:required|needed))|requires?|needs?"
    r"|is (?:reserved|only for|not (?:justified|warranted|deserved|possible)))\b"
)
"""What stands before and after a higher score that the answer does not get: ``A score of 10 would require``."""
TURN = re.compile(
    r"[\n\[<](?:(?<=\n)[#* ]{0,6}(?:Human|User|HUMAN|USER|Question)\b[* ]{0,4}:|(?<=\[)INST\]"
    r"|(?<=<)(?:\|im_start\||\|start_header_id\||start_of_turn)>user)"
)
"""The beginning of a turn of the user. After a verdict, it is a question that the model made up and then answers."""
QUALIFIED = re.compile(
    r"[*_\"'`)\]}>]{0,6}[^\S\n]{0,3}(?:(?://|[(,])\s?)?"
    r"(?:[?\u061f]|(?:or|if|unless|vs|versus|loses)\b|is (?:not|worse|wrong)\b)"
    r"|[*_\"'`)\]}>]{0,6}[^\S\n]{0,3}\n[^\S\n]{0,3}"
    r"(?:(?:but )?(?:only )?(?:if|when|for)|but (?:only|not)|or|unless|is|was|would|could|might|requires|means"
    r"|minus|provided|assuming)\b"
)
"""Text after a candidate of any format that qualifies it."""
REVISED = (
    r"(?:[\s#=>*_\u2012-]|(?:final(?: answer)?|overall|revised|corrected|updated|adjusted|new|total|so|thus|hence"
    r"|therefore|my|update|better|on balance|all in all|in the end|on the whole|correction|rating|grade|mark"
    r"|verdict|judge?ment|decision|conclusion|evaluation|assessment"
    r"|i(?:'d| would) say)\b[:,=]?){0,9}+"
)
"""What may stand in a line before a value that replaces the verdict."""
CLAIM = (
    r"[.!\n]\s{0,3}(?:(?:so|thus|hence|therefore),?\s)?the\s(?:(?:final|given|model's|student's|submitted)\s)?"
    r"(?:answer|response|solution|submission)\sis\s(?:therefore\s|thus\s|clearly\s|actually\s)?"
)
"""What may stand before a word that is another verdict."""
ITEM_MARK = re.compile(r"[\s*_~`(\[]*(?:(?:[-*+#|>]+|\d{1,2}[.)]|[a-z][.)])\s*)*[\s*_~`(\[]*")
HEADING = re.compile(r"^[^\S\n]{0,3}(?:\#{1,6}[^\S\n]|\*\*)([^\n]{1,60}?)(?:\*\*)?:?[^\S\n]*$", re.MULTILINE)
FINAL_NAME = _any_case(
    r"\b(?:final(?:ly)?|overall|total|conclusions?|concluding|verdict|summary|average|mean|weighted|combined"
    r"|revised|corrected"
    r"|updated|adjusted|after|now|therefore|thus|so|hence|my|judge?ment|decision|aggregate|all)\b"
)
"""Words in the name of the last item of a list that make it the verdict."""
DESCRIBED = re.compile(r"[*_`)\]]*[^\S\n]*(?:[-\u2012=:(\u2192]|(?:for|on|in)\b)[^\S\n]*[^\s\d]")
RESTATED = (
    r"(?:\A|[.!?\n])[\s#>*_(-]{0,9}(?:(?:so|thus|hence|therefore),?\s)?(?:(?:the|my|our|final|overall|total"
    r"|revised|corrected"
    r"|updated)\s){0,3}(?:%s)[*_`\"']{0,4}(?:\s(?:is|should be|would be|of|now))*[*_`\"']{0,4}\s?(?:[:=]|(?<=is"
    r"|be|of|ow)\s)"
    r"[\s*_`\"'$(\[]{0,8}(?P<value>-?\d{1,9}(?:\.\d{1,9})?|[^\W\d_]{1,40})\b"
)
RATING_NAMES = ("score", "rating", "grade", "mark", "verdict", "judgment", "judgement", "decision")
SAYING = _any_case(
    r"\b(?:wrote|writes?|written|says?|said|states?|stated|claims?|claimed|quotes?|quoted|contains?|outputs|prints?"
    r"|reads?|begins?|ends?)\b(?:\s(?:with|in|as))?[\s:,*_\"'`(>]{0,6}\Z"
)
QUOTES = "\"'`\u2018\u201c\u201e\u00ab\u300c\u300e"


NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
"""The numbers that may be written as words."""
