/** Draws small programs, of what an engine can do. */
import { random } from "../random.ts";
import type { ActorProgram, FaultName, Operation, Program } from "./program.ts";

export type EngineName = "postgres" | "mysql" | "mariadb" | "sqlite";

/** What an engine can do, and how it says it. */
export interface Abilities {
  readonly engine: EngineName;
  readonly levels: readonly (readonly string[])[];
  /** Statements and clauses that not all of them have. */
  readonly can: ReadonlySet<Ability>;
  readonly faults: readonly FaultName[];
}

type Ability =
  | "row locks"
  | "share locks"
  | "skip locked"
  | "session locks"
  | "transaction locks"
  | "table locks"
  | "functions"
  | "writing functions"
  | "deciding tables"
  | "numbered tables"
  | "foreign keys"
  | "triggers"
  | "views"
  | "update from"
  | "update join"
  | "on conflict"
  | "on duplicate key"
  | "writes in WITH"
  | "TABLE";

const begin = (level: string) => [`BEGIN ISOLATION LEVEL ${level}`];
const set = (level: string) => [`SET TRANSACTION ISOLATION LEVEL ${level}`, "START TRANSACTION"];

const mysql: ReadonlySet<Ability> = new Set([
  "row locks",
  "share locks",
  "skip locked",
  "session locks",
  "functions",
  "writing functions",
  "numbered tables",
  "foreign keys",
  "triggers",
  "views",
  "update join",
  "on duplicate key",
] as const);

/** Each level as often as it is in the list. */
export const abilities: Readonly<Record<EngineName, Abilities>> = {
  postgres: {
    engine: "postgres",
    levels: [["BEGIN"], ["BEGIN"], ["BEGIN"], begin("REPEATABLE READ"), begin("SERIALIZABLE")],
    can: new Set([
      "row locks",
      "share locks",
      "skip locked",
      "session locks",
      "transaction locks",
      "table locks",
      "functions",
      "writing functions",
      "deciding tables",
      "numbered tables",
      "foreign keys",
      "triggers",
      "views",
      "update from",
      "on conflict",
      "writes in WITH",
      "TABLE",
    ] as const),
    faults: ["crash", "lost commit", "twice"],
  },
  mysql: {
    engine: "mysql",
    levels: [["START TRANSACTION"], set("READ COMMITTED"), set("REPEATABLE READ"), set("SERIALIZABLE")],
    can: mysql,
    faults: ["crash", "lost commit", "twice"],
  },
  mariadb: {
    engine: "mariadb",
    levels: [["START TRANSACTION"], set("READ COMMITTED"), set("REPEATABLE READ"), set("SERIALIZABLE")],
    can: mysql,
    faults: ["crash", "lost commit", "twice"],
  },
  sqlite: {
    engine: "sqlite",
    levels: [["BEGIN"], ["BEGIN"], ["BEGIN IMMEDIATE"], ["BEGIN EXCLUSIVE"]],
    can: new Set(["triggers", "views", "foreign keys", "update from", "on conflict"] as const),
    faults: ["crash", "twice"],
  },
};

/** What the explorer is known to judge wrongly, and somebody works on: not drawn for now. */
export const leftOut = {
  /** Locks of gaps at REPEATABLE READ and SERIALIZABLE come and go with the purge. */
  gapLocks: true,
  /** Tables that the explorer does not find in the text of a statement. */
  unreadTables: true,
};

interface Draw {
  /** One of them. */
  of<T>(...all: readonly T[]): T;
  chance(share: number): boolean;
  /** From 0. */
  below(n: number): number;
}

function drawing(seed: number): Draw {
  const next = random(seed);
  const below = (n: number) => Math.floor(next() * n);
  return { below, chance: (share) => next() < share, of: (...all) => all[below(all.length)] as never };
}

type Kind = "reads" | "writes";
type Statement = readonly [weight: number, kind: Kind, text: (draw: Draw) => string, needs?: Ability];

const table = (draw: Draw) => draw.of("t", "t", "t", "u");
const id = (draw: Draw) => draw.of(1, 1, 1, 1, 2);
const amount = (draw: Draw) => draw.of(1, 2, 5);

const statements = (engine: EngineName): readonly Statement[] => {
  const family = engine === "mysql" || engine === "mariadb";
  const dual = family ? " FROM dual" : "";
  const share = family && engine === "mariadb" ? "LOCK IN SHARE MODE" : "FOR SHARE";
  const skip = (draw: Draw) => draw.of("SKIP LOCKED", "NOWAIT");
  const all: Statement[] = [
    [6, "reads", (d) => `SELECT n FROM ${table(d)} WHERE id = ${id(d)}`],
    [2, "reads", (d) => `SELECT count(*) FROM ${d.of("t", "u", "l")}`],
    [2, "reads", (d) => `SELECT coalesce(sum(n), 0) FROM ${table(d)}`],
    [1, "reads", (d) => `SELECT count(*) FROM ${table(d)} WHERE n < ${d.of(2, 4)}`],
    [1, "reads", () => "SELECT count(*) FROM t JOIN u ON u.id = t.id WHERE t.n <= u.n"],
    [1, "reads", () => "SELECT coalesce(max(id), 0) FROM u"],
    [4, "reads", (d) => `SELECT n FROM ${table(d)} WHERE id = ${id(d)} FOR UPDATE`, "row locks"],
    [1, "reads", (d) => `SELECT n FROM ${table(d)} WHERE id = ${id(d)} ${share}`, "share locks"],
    [1, "reads", (d) => `SELECT id FROM t ORDER BY id LIMIT 1 FOR UPDATE ${skip(d)}`, "skip locked"],
    [1, "reads", (d) => `SELECT n FROM t WHERE id = ${id(d)} FOR UPDATE ${skip(d)}`, "skip locked"],
    [1, "reads", () => "SELECT line_count()", "functions"],
    [1, "reads", () => "SELECT s FROM w", "views"],
    [6, "writes", (d) => `UPDATE ${table(d)} SET n = n + ${amount(d)} WHERE id = ${id(d)}`],
    [6, "writes", (d) => `UPDATE ${table(d)} SET n = {v} + ${amount(d)} WHERE id = ${id(d)}`],
    [2, "writes", (d) => `UPDATE ${table(d)} SET n = n - 2 WHERE id = ${id(d)} AND n >= 2`],
    [1, "writes", (d) => `UPDATE ${table(d)} SET n = n + 1 WHERE n < ${d.of(2, 4)}`],
    [2, "writes", (d) => `UPDATE t SET n = (SELECT count(*) FROM ${d.of("u", "l")}) WHERE id = ${id(d)}`],
    [
      1,
      "writes",
      (d) => `UPDATE t SET n = t.n + u.n FROM u WHERE u.id = t.id AND t.id = ${id(d)}`,
      "update from",
    ],
    [
      1,
      "writes",
      (d) => `UPDATE t JOIN u ON u.id = t.id SET t.n = t.n + u.n WHERE t.id = ${id(d)}`,
      "update join",
    ],
    [1, "writes", (d) => `DELETE FROM ${table(d)} WHERE id = ${id(d)}`],
    [1, "writes", (d) => `DELETE FROM ${d.of("t WHERE n", "u WHERE n", "l WHERE v")} > ${d.of(1, 3)}`],
    [4, "writes", (d) => `INSERT INTO l VALUES (${d.of("{v}", "7", "8")})`],
    [3, "writes", (d) => `INSERT INTO l SELECT 1${dual} WHERE (SELECT count(*) FROM l) < ${d.of(1, 2)}`],
    [1, "writes", (d) => `INSERT INTO l SELECT n FROM ${table(d)} WHERE id = ${id(d)}`],
    [
      1,
      "writes",
      (d) => `INSERT INTO l SELECT 1${dual} WHERE NOT EXISTS (SELECT * FROM u WHERE id = ${d.of(2, 3)})`,
    ],
    [2, "writes", (d) => `INSERT INTO u VALUES (${d.of(2, 3, 3)}, ${amount(d)})`],
    [
      2,
      "writes",
      (d) => `INSERT INTO u VALUES (3, 1) ON CONFLICT (id) DO ${d.of("UPDATE SET n = u.n + 1", "NOTHING")}`,
      "on conflict",
    ],
    [2, "writes", () => "INSERT INTO u VALUES (3, 1) ON DUPLICATE KEY UPDATE n = n + 1", "on duplicate key"],
    [1, "writes", () => "INSERT IGNORE INTO u VALUES (3, 1)", "on duplicate key"],
    [2, "writes", () => "INSERT INTO d (b) VALUES (1)", "deciding tables"],
    [1, "writes", () => "INSERT INTO c VALUES (1)", "deciding tables"],
    [1, "writes", () => "INSERT INTO p VALUES (1)", "deciding tables"],
    [1, "writes", () => "INSERT INTO q VALUES (1)", "deciding tables"],
    [2, "writes", (d) => `INSERT INTO e (b) VALUES (${d.of(1, 2)})`, "numbered tables"],
    [1, "writes", (d) => `INSERT INTO f VALUES (${d.of(1, 2)})`, "foreign keys"],
    [
      1,
      "writes",
      () => "DELETE FROM t WHERE id = 1 AND NOT EXISTS (SELECT * FROM f WHERE f.t = 1)",
      "foreign keys",
    ],
    [0.3, "writes", () => "INSERT INTO g VALUES (1)", "triggers"],
    [0.3, "writes", () => "SELECT book()", "writing functions"],
    [
      1,
      "writes",
      () => "WITH gone AS (DELETE FROM u WHERE id = 1 RETURNING n) INSERT INTO l SELECT n FROM gone",
      "writes in WITH",
    ],
  ];
  if (!leftOut.unreadTables)
    all.push(
      [2, "reads", () => "SELECT count(*) FROM (t JOIN u ON u.id = t.id) WHERE t.n <= u.n"],
      [1, "reads", (d) => `SELECT count(*) FROM t JOIN l ON l.v = t.n, u WHERE u.id = ${id(d)}`],
      [2, "writes", () => "UPDATE t JOIN u ON u.id = t.id SET u.n = u.n + t.n", "update join"],
      [2, "writes", () => "DELETE u FROM t JOIN u ON u.id = t.id WHERE t.n > 1", "update join"],
      [2, "writes", () => "INSERT INTO l TABLE l", "TABLE"],
      [2, "writes", () => "INSERT INTO l SELECT 1 WHERE NOT EXISTS (TABLE l)", "TABLE"],
    );
  return all;
};

class Generator {
  readonly #draw: Draw;
  readonly #abilities: Abilities;
  readonly #statements: readonly Statement[];
  /** Tables of which at least one is in most statements. */
  readonly #focus: ReadonlySet<string>;
  readonly isDense: boolean;
  /** How many more steps the actor may have. */
  #left = 0;

  constructor(draw: Draw, can: Abilities) {
    this.#draw = draw;
    this.#abilities = can;
    this.isDense = draw.chance(0.3);
    this.#focus = new Set(draw.chance(0.85) ? [draw.of("t", "t", "u", "l")] : []);
    this.#statements = statements(can.engine).filter(([, , , needs]) => !needs || can.can.has(needs));
  }

  #statement(kind: Kind, inside: boolean): Operation {
    const some = this.#statements.filter((each) => each[1] === kind);
    const sum = some.reduce((all, [weight]) => all + weight, 0);
    for (let tries = 0; ; tries++) {
      let at = (this.#draw.below(10_000) / 10_000) * sum;
      const found = some.find(([weight]) => (at -= weight) < 0);
      if (!found) continue;
      const text = found[2](this.#draw);
      // By itself, a row lock is gone at once.
      if (!inside && / for (update|share)| in share mode/i.test(text)) continue;
      // Programs meet where they use the same tables.
      if (tries < 20 && this.#focus.size > 0 && tablesOf(text).every((each) => !this.#focus.has(each)))
        continue;
      this.#left -= kind === "writes" && !inside ? 2 : 1;
      return { do: "send", text };
    }
  }

  #poll(): Operation[] {
    this.#left -= 3;
    return [
      { do: "send", text: "SELECT coalesce(max(id), 0) FROM e", hidden: true },
      { do: "send", text: "INSERT INTO l SELECT b FROM e WHERE id <= {v}" },
      { do: "send", text: "DELETE FROM e WHERE id <= {v}" },
    ];
  }

  /** Reads a row, and writes what it has made of it. */
  #readAndWrite(inside: boolean): Operation[] {
    const draw = this.#draw;
    this.#left -= inside ? 2 : 3;
    const [of, row] = [draw.of("t", "t", "u"), id(draw)];
    const lock = inside && this.#can("row locks") && draw.chance(0.25) ? " FOR UPDATE" : "";
    const [read, write] = draw.of(
      [`SELECT n FROM ${of} WHERE id = ${row}${lock}`, `UPDATE ${of} SET n = {v} + 1 WHERE id = ${row}`],
      [`SELECT n FROM ${of} WHERE id = ${row}${lock}`, "INSERT INTO l VALUES ({v})"],
      ["SELECT count(*) FROM l", "INSERT INTO l VALUES ({v})"],
      [`SELECT coalesce(sum(n), 0) FROM ${of}`, `UPDATE ${of} SET n = {v} WHERE id = ${row}`],
    );
    const writing: Operation = { do: "send", text: write };
    return [
      { do: "send", text: read },
      draw.chance(0.3) ? { do: "if below", limit: draw.of(1, 2, 3), body: [writing] } : writing,
    ];
  }

  /** Reads and writes of two rows: of these, every other order is another outcome. */
  #dense(inside: boolean): Operation[] {
    const draw = this.#draw;
    const body: Operation[] = [];
    // No two texts are the same: the explorer takes the same again for a poll.
    while (this.#left > 0) {
      const reads = draw.chance(0.55);
      this.#left -= reads || inside ? 1 : 2;
      const nth = body.length + 1;
      const text = reads
        ? draw.of(
            `SELECT ${nth}, n FROM t WHERE id = 1`,
            `SELECT ${nth}, n FROM t WHERE id = 1`,
            `SELECT ${nth}, count(*) FROM l`,
          )
        : draw.of(`UPDATE t SET n = n + ${nth} WHERE id = 1`, `INSERT INTO l VALUES (${nth})`);
      body.push({ do: "send", text });
    }
    return body;
  }

  #body(inside: boolean, depth: number): Operation[] {
    const draw = this.#draw;
    if (this.isDense) return this.#dense(inside);
    const body: Operation[] = [];
    while (this.#left > 0 && (body.length === 0 || draw.chance(0.9))) {
      const kind = draw.below(20);
      if (kind === 0 && depth < 1 && this.#left > 2) {
        const left = this.#left;
        this.#left = Math.floor(left / 2);
        const used = this.#left;
        const within = this.#body(inside, depth + 1);
        this.#left = left - 2 * (used - this.#left);
        body.push({ do: "repeat", times: 2, body: within });
      } else if (kind <= 2 && inside && depth < 2 && this.#left > 1)
        body.push({
          do: "savepoint",
          body: this.#body(true, depth + 1),
          back: draw.of("always", "on error", "on error", "never"),
        });
      else if (kind <= 8 && this.#left > 1) {
        body.push(this.#statement("reads", inside));
        if (depth < 2 && draw.chance(0.5))
          body.push({ do: "if below", limit: draw.of(1, 2, 3), body: [this.#statement("writes", inside)] });
      } else if (kind >= 14 && this.#left > 1) body.push(...this.#readAndWrite(inside));
      else if (kind === 9 && this.#can("numbered tables") && this.#left > 2) body.push(...this.#poll());
      else body.push(this.#statement(draw.chance(0.35) ? "reads" : "writes", inside));
    }
    return body;
  }

  #can(ability: Ability): boolean {
    return this.#abilities.can.has(ability);
  }

  #transaction(begins: readonly string[], retries: number): Operation {
    const draw = this.#draw;
    this.#left -= 1;
    const body: Operation[] = [];
    if (this.#can("transaction locks") && draw.chance(0.1)) {
      body.push({ do: "send", text: `SELECT pg_advisory_xact_lock(${draw.of(1, 1, 2)})` });
      this.#left -= 1;
    } else if (this.#can("transaction locks") && draw.chance(0.03)) {
      body.push({ do: "send", text: "SELECT pg_try_advisory_xact_lock(1)::int" });
      this.#left -= 1;
    } else if (this.#can("table locks") && draw.chance(0.06)) {
      body.push({
        do: "send",
        text: `LOCK TABLE ${table(draw)} IN ${draw.of("EXCLUSIVE", "SHARE", "ACCESS EXCLUSIVE")} MODE`,
      });
      this.#left -= 1;
    }
    return { do: "transaction", begin: begins, body: [...body, ...this.#body(true, 0)], retries };
  }

  actor(steps: number, shared: { locked: boolean }): ActorProgram {
    const draw = this.#draw;
    this.#left = steps;
    const level = () => draw.of(...this.#abilities.levels);
    const retries = () => (draw.chance(0.3) ? draw.of(1, 2) : 0);
    const body: Operation[] = [];
    if (draw.chance(this.isDense ? 0.3 : 0.6)) {
      if (draw.chance(0.2)) body.push(this.#statement(draw.of("reads", "writes"), false));
      body.push(this.#transaction(level(), retries()));
    } else body.push(...this.#body(false, 0));
    const returns = this.isDense ? "all" : draw.of("nothing", "last", "all", "all", "all", "all");
    const prepared = draw.chance(0.3);
    if (!shared.locked || !this.#can("session locks") || draw.chance(0.15))
      return { body, returns, prepared };
    const [lock, unlock] =
      this.#abilities.engine === "postgres"
        ? ["SELECT pg_advisory_lock(9)", "SELECT pg_advisory_unlock(9)"]
        : ["SELECT GET_LOCK('nine', 20)", "SELECT RELEASE_LOCK('nine')"];
    return { body: [{ do: "locked", lock, unlock, body }], returns, prepared };
  }
}

/** The same one for the same seed, index and size. */
export function generate(can: Abilities, seed: number, index: number, size: "small" | "large"): Program {
  const draw = drawing(Math.imul(seed, 0x9e3779b1) ^ Math.imul(index + 1, 0x85ebca6b));
  for (;;) {
    const program = drawn(can, draw, index, size);
    if (worthwhile(program, draw) && !leavesOut(can, program)) return program;
  }
}

/** Actors that do not meet are dull; some have to be there. */
function worthwhile({ actors }: Program, draw: Draw): boolean {
  const texts = Object.values(actors).map((actor) => JSON.stringify(actor));
  const meet = texts.some((text, i) =>
    texts.some((other, j) => i < j && tablesOf(other).some((each) => tablesOf(text).includes(each))),
  );
  const write = texts.some((text) =>
    /"(INSERT|UPDATE|DELETE|WITH)|FOR (UPDATE|SHARE)|book\(|LOCK/.test(text),
  );
  return (meet && write) || draw.chance(0.05);
}

const gaps =
  /DELETE|IGNORE|DUPLICATE|INTO [ufgde]\b|SELECT.* (FROM|JOIN)(?!.*WHERE id = 1\b)|n <|id = [23]|book|line_count/;

function leavesOut({ engine }: Abilities, program: Program): boolean {
  const text = JSON.stringify(program.actors);
  const family = engine === "mysql" || engine === "mariadb";
  return (
    family &&
    leftOut.gapLocks &&
    /REPEATABLE|SERIALIZABLE/.test(text) &&
    statementsOf(text).some((each) => gaps.test(each))
  );
}

const statementsOf = (text: string) => [...text.matchAll(/"text":"([^"]*)"/g)].map(([, each = ""]) => each);

function drawn(can: Abilities, draw: Draw, index: number, size: "small" | "large"): Program {
  const generator = new Generator(draw, can);
  const faulty = draw.chance(0.12);
  const three = !faulty && draw.chance(0.08);
  const shared = { locked: !faulty && !three && draw.chance(0.06) };
  const names = three ? ["A", "B", "C"] : ["A", "B"];
  const steps = () =>
    generator.isDense && !faulty && !three
      ? 3
      : faulty || three
        ? 2
        : size === "small"
          ? 2 + draw.below(2)
          : 3 + draw.below(3);
  const first = generator.actor(steps(), shared);
  // The same function called twice at the same time is how most races look.
  const alike = draw.chance(0.5);
  const actors = Object.fromEntries(
    names.map((name, i) => [name, i === 0 || alike ? first : generator.actor(steps(), shared)]),
  );
  const text = JSON.stringify(actors);
  const tables = tablesOf(text);
  return {
    index,
    tables,
    rows: rowsOf(draw, tables),
    actors,
    faults: faulty ? [draw.of(...can.faults)] : [],
    once: draw.chance(0.5),
    mayGiveUp: !faulty && draw.chance(0.5),
  };
}

/** In the order in which they can be emptied. */
const allTables = ["f", "g", "t", "u", "l", "d", "c", "p", "q", "e"];

function tablesOf(text: string): string[] {
  const named = new Set(
    [...text.matchAll(/\b(?:FROM|JOIN|INTO|UPDATE|TABLE) \(?(\w)\b/g)].map(([, each]) => each),
  );
  if (/line_count\(\)|book\(\)/.test(text) || named.has("g")) named.add("l");
  if (named.has("w") || named.has("f")) named.add("t");
  if (named.has("p") || named.has("q")) for (const each of "pq") named.add(each);
  // A foreign key refers to it.
  if (named.has("t")) named.add("f");
  return allTables.filter((each) => named.has(each));
}

function rowsOf(draw: Draw, tables: readonly string[]): string[] {
  const rows: string[] = [];
  if (tables.includes("t")) rows.push(`INSERT INTO t VALUES (1, ${draw.below(4)}), (2, ${draw.below(4)})`);
  if (tables.includes("u")) rows.push(`INSERT INTO u VALUES (1, ${draw.below(4)})`);
  if (tables.includes("l") && draw.chance(0.3)) rows.push("INSERT INTO l VALUES (0)");
  return rows;
}
