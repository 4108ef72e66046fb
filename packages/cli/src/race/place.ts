/**
 * The database that scenarios are run in: one of the run's own, unless somebody has said otherwise. It is there before the file
 * is loaded, and is what DATABASE_URL says from then on: modules that read it, and not what they are given, are in it too.
 */
import { randomBytes } from "node:crypto";
import { sql } from "holdfast";
import { execute } from "holdfast/testing";
import { confirmed } from "../confirm.ts";
import { startPostgres } from "../embedded.ts";
import { Failure } from "../failure.ts";
import { OwnDatabase, dropStatement, leftovers, tidy } from "../own-database.ts";
import { type Server, type Session, connect, inSafePath, kindOf } from "../server.ts";
import { type Given, given, withoutSecrets } from "../url.ts";
import { makeMysql } from "./copy-mysql.ts";
import { makePostgres } from "./copy-postgres.ts";
import type { RaceScenario } from "./load.ts";
import { OwnConnections, type Seen, listOf, sessionsIn } from "./sessions.ts";

export interface PlaceOptions {
  readonly file: string;
  readonly url?: string | undefined;
  readonly empty?: boolean | undefined;
  readonly inPlace?: boolean | undefined;
  readonly yes?: boolean | undefined;
  readonly say: (note: string) => void;
  /** Told what must not go on, while scenarios are run. */
  readonly stop: (reason: Failure) => void;
}

/** As `--json` tells it. */
export interface Told {
  readonly how: "embedded" | "copy" | "empty" | "in place";
  readonly name: string;
  /** Without its password. */
  readonly server?: string;
}

export interface Place extends AsyncDisposable {
  readonly told: Told;
  /** For the next scenario. */
  url(): Promise<string>;
  /** Throws if a scenario is about another database than this one. To be called right before it is run. */
  check(scenario: RaceScenario): Promise<void>;
  /** Whether it is as it should be, while scenarios are run: `stop` is told if not. */
  look(): void;
}

/** Undefined: the answer was no. */
export async function openPlace(options: PlaceOptions): Promise<Place | undefined> {
  const found = given(options.url);
  if (options.inPlace && found?.by !== "--url")
    throw new Failure(
      "--in-place is for the database that --url names. That a variable names one is no word of yours that it may be written to.",
    );
  if (!found) return embedded(options);
  if (kindOf(found) === "sqlite")
    throw new Failure(
      `${withoutSecrets(found.url)} (${found.by}) is SQLite, which race cannot hold back: its races are found in a test, with inThread of holdfast/testing (docs/races.md).`,
    );
  return options.inPlace ? inPlace(found, options) : beside(found, options);
}

/** What modules find who do not take the address that they are given. */
function publish(url: string): string {
  process.env["DATABASE_URL"] = process.env["HOLDFAST_URL"] = url;
  return url;
}

async function embedded({ say }: PlaceOptions): Promise<Place> {
  say("No --url, HOLDFAST_URL or DATABASE_URL: on a PostgreSQL of its own, which is gone afterwards.");
  // Nothing of it has to outlive the power, and every run commits.
  const server = await startPostgres({
    settings: { fsync: "off", full_page_writes: "off", synchronous_commit: "off" },
  });
  const names: string[] = [];
  const create = async (): Promise<string> => {
    const name = `holdfast_race_${randomBytes(6).toString("hex")}`;
    await server.createDatabase(name);
    names.push(name);
    return publish(server.url(name));
  };
  let first: string | undefined;
  try {
    first = await create();
  } catch (error) {
    await server.stop();
    throw error;
  }
  return {
    told: { how: "embedded", name: names[0] ?? "" },
    async url() {
      const url = first ?? (await create());
      first = undefined;
      return url;
    },
    check: (scenario) => refuseElsewhere(scenario, (name) => names.includes(name)),
    look: () => {},
    [Symbol.asyncDispose]: () => server.stop(),
  };
}

/** On the same server, in a database of its own. */
async function beside({ url, by }: Given, options: PlaceOptions): Promise<Place> {
  const { say, stop, empty = false, yes } = options;
  await using cleanup = new AsyncDisposableStack();
  const server = cleanup.use(
    await connect({ url, kinds: ["postgres", "mysql", "mariadb"], application: "holdfast race", most: 1 }),
  );
  const family = familyOf(server);
  await tellOfLeftovers(server, yes, say);
  const own = new OwnDatabase(server, "race", "database", (each, why) => {
    process.stderr.write(
      `holdfast: the database ${each.name} on ${server.shown} could not be removed: ${why}. Run holdfast race again, which offers to, or: ${dropStatement(each)}\n`,
    );
  });
  cleanup.use(own);
  const address = new URL(url);
  const source = await nameOf(server);
  address.pathname = `/${own.name}`;
  let keeper: Session;
  if (family === "postgres") {
    await makePostgres(server, own, empty);
    const inside = cleanup.use(await connect({ url: address.href, application: own.name, most: 1 }));
    keeper = cleanup.use(await inside.session());
  } else {
    keeper = cleanup.use(await server.session());
    await makeMysql(server, own, empty || source === undefined, keeper);
  }
  const copied = !empty && source !== undefined;
  say(
    `In the database ${own.name}, ${copied ? `a copy of "${source}"` : "which is empty"}, on ${withoutSecrets(url)} (${by}). It is removed afterwards.`,
  );
  // Nobody else of this process has business in the original.
  const theirs = cleanup.use(new OwnConnections());
  const watch = new Watch(keeper, family, source ?? "", (seen) => {
    if (seen.some(({ port }) => theirs.has(port)))
      stop(
        new Failure(
          `${options.file} has opened a connection to "${source}" itself, and not to the database that was made for it (${own.name}): take the address from the \`url\` that the function is given, or from DATABASE_URL.`,
        ),
      );
  });
  publish(address.href);
  const last = cleanup.move();
  return {
    told: { how: copied ? "copy" : "empty", name: own.name, server: withoutSecrets(url) },
    url: () => Promise.resolve(address.href),
    async check(scenario) {
      await watch.settled();
      await refuseElsewhere(scenario, (name) => name === own.name);
    },
    look: () => watch.look(),
    async [Symbol.asyncDispose]() {
      await watch.settled();
      await last.disposeAsync();
    },
  };
}

type Family = "postgres" | "mysql";
const familyOf = ({ kind }: Server): Family => (kind === "postgres" ? "postgres" : "mysql");

async function nameOf({ kind, query }: Server): Promise<string | undefined> {
  const [row] = await query(`SELECT ${kind === "postgres" ? "current_database()" : "DATABASE()"} AS name`);
  return row?.["name"] == null ? undefined : String(row["name"]);
}

/** Whoever cannot be asked is told. */
async function tellOfLeftovers(
  server: Server,
  yes: boolean | undefined,
  say: (note: string) => void,
): Promise<void> {
  const found = await leftovers(server, "race");
  if (found.length === 0) return;
  if (yes || (process.stdin.isTTY && process.stderr.isTTY)) await tidy(server, found, yes);
  else
    say(
      `An earlier run was killed, and left ${found.map(({ name }) => name).join(", ")} on ${server.shown}: ${found.map(dropStatement).join("; ")}`,
    );
}

/** In the very database that was named, if nobody else is in it. */
async function inPlace({ url }: Given, options: PlaceOptions): Promise<Place | undefined> {
  await using cleanup = new AsyncDisposableStack();
  const ours = cleanup.use(new OwnConnections());
  const server = cleanup.use(
    await connect({ url, kinds: ["postgres", "mysql", "mariadb"], application: "holdfast race", most: 2 }),
  );
  const family = familyOf(server);
  const name = await nameOf(server);
  if (name === undefined) throw new Failure(`${server.shown} names no database to run in.`);
  if (family === "mysql") await refuseBlind(server);
  const others = (await sessionsIn(server, family, name)).filter(({ self }) => !self);
  if (others.length > 0) throw notAlone(name, listOf(others));
  const { sessionLocks } = await server.hf.capabilities();
  const why = typeof sessionLocks === "object" ? sessionLocks.why : undefined;
  if (why !== undefined)
    throw new Failure(
      `${server.shown}: who else is in "${name}" cannot be seen from here (${why}). Name the server itself, or leave --in-place out, and the scenarios are run in a copy.`,
    );
  const question = `Run ${options.file} in "${name}" itself, on ${server.shown}? Its functions, and the \`reset\` of each scenario, write to your tables.`;
  if (!(await confirmed(question, options.yes))) return undefined;
  options.say(`In "${name}" itself, on ${server.shown} (--url).`);
  const keeper = cleanup.use(await server.session());
  const proof = await proofOf(keeper, family);
  const watch = new Watch(keeper, family, name, (seen) => {
    // Behind a pooler, or a port that is passed on, nobody is known by the port.
    if (!seen.some(({ self, port }) => self && ours.has(port))) return;
    const strangers = seen.filter(({ port }) => !ours.has(port));
    if (strangers.length > 0) options.stop(notAlone(name, listOf(strangers)));
  });
  publish(url);
  const last = cleanup.move();
  return {
    told: { how: "in place", name, server: server.shown },
    url: () => Promise.resolve(url),
    async check(scenario) {
      await watch.settled();
      await refuseElsewhere(scenario, (found) => found === name, proof);
    },
    look: () => watch.look(),
    async [Symbol.asyncDispose]() {
      await watch.settled();
      await last.disposeAsync();
    },
  };
}

function notAlone(name: string, who: string): Failure {
  return new Failure(
    `Others are in "${name}" (${who}): what they write could be lost, or could be what the scenarios find. Let them end, or leave --in-place out, and the scenarios are run in a copy.`,
  );
}

/** Who is there is seen by those who may. */
async function refuseBlind(server: Server): Promise<void> {
  const rows = await server.query(
    "SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'PROCESS' LIMIT 1",
  );
  if (rows.length === 0)
    throw new Failure(
      `${server.shown}: this user may not see who else is there, which has to be known before anything is run in place: GRANT PROCESS ON *.* TO … Without --in-place the scenarios are run in a copy.`,
    );
}

interface Proof {
  readonly id: string;
  readonly lock: string;
}

async function proofOf(session: Session, family: Family): Promise<Proof> {
  const lock = `holdfast_race_${randomBytes(6).toString("hex")}`;
  const [row] =
    family === "postgres"
      ? await session.query("SELECT pg_catalog.pg_backend_pid() AS id")
      : await session.query("SELECT CONNECTION_ID() AS id, GET_LOCK(?, 0)", [lock]);
  return { id: String(row?.["id"]), lock };
}

const lookMs = 250;

/**
 * Looks who is in a database, again and again. Not by a timer: what it sends must come while explore reads along, which else
 * would take it for somebody else's.
 */
class Watch {
  readonly #session: Session;
  readonly #family: Family;
  readonly #name: string;
  readonly #told: (seen: readonly Seen[]) => void;
  #looked = -Infinity;
  #looking: Promise<void> | undefined;

  constructor(session: Session, family: Family, name: string, told: (seen: readonly Seen[]) => void) {
    this.#session = session;
    this.#family = family;
    this.#name = name;
    this.#told = told;
  }

  look(): void {
    const now = performance.now();
    if (this.#looking || now - this.#looked < lookMs) return;
    this.#looked = now;
    // One that fails says nothing of who is there.
    const session = this.#session;
    const query: Session["query"] =
      this.#family === "postgres"
        ? (text, values) => inSafePath((each, bound) => session.query(each, bound), text, values)
        : (text, values) => session.query(text, values);
    this.#looking = sessionsIn({ query }, this.#family, this.#name)
      .then(this.#told)
      .catch(() => {})
      .finally(() => (this.#looking = undefined));
  }

  async settled(): Promise<void> {
    await this.#looking;
  }
}

/**
 * A scenario brings the database that it is about. One that is not this run's is somebody's, and nobody has said that it may be
 * written to. `proof`: a session of ours that can be seen from there, since a name may be that of another server's.
 */
async function refuseElsewhere(
  { db, ownDatabase }: RaceScenario,
  isOurs: (name: string) => boolean,
  proof?: Proof,
): Promise<void> {
  const family = db?.engine.name;
  if (ownDatabase || (family !== "postgres" && family !== "mysql")) return;
  const [row] = await execute(
    { database: db },
    family === "postgres"
      ? sql`SELECT pg_catalog.current_database() AS name, ARRAY(SELECT a.pid FROM pg_catalog.pg_stat_activity a WHERE a.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())::pg_catalog.text AS ids`
      : sql`SELECT DATABASE() AS name, IS_USED_LOCK(${proof?.lock ?? "holdfast"}) AS ids`,
  );
  const name = String(row?.["name"]);
  const seen = !proof || String(row?.["ids"]).split(/\D+/).includes(proof.id);
  if (isOurs(name) && seen) return;
  throw new Error(
    `its \`db\` is in "${name}"${isOurs(name) ? " on another server" : ""}, and not in the database of this run: take the address from the \`url\` that a function is given, or from DATABASE_URL, which says the same. A scenario that makes a database by itself says \`ownDatabase: true\`; to run in one of yours, name it with --url and --in-place`,
  );
}
