/**
 * Stands between a client and a PostgreSQL, and lies: it speaks the protocol to both, with sessions of its own, and changes what
 * is asked, whom, or what is answered. Each lie is told by some product, pooler or setting. Without one it is honest.
 */
import { type Server, type Socket, createServer } from "node:net";
import { Client } from "pg";

/** What is sent in one go: a query, or what comes before a Sync; answered up to ReadyForQuery. */
export interface Request {
  readonly messages: readonly Message[];
  /** The text of a simple query, or of the statement that is parsed. */
  readonly text: string;
}

export interface Message {
  readonly type: string;
  readonly body: Buffer;
}

export interface Lie {
  readonly name: string;
  /** Who does so. */
  readonly like: string;
  /** Line of the report that catches it, or lines. */
  readonly caught: readonly string[];
  /** The verdict of these; default: fails. */
  readonly verdict?: "fails" | "absent" | "unknown";
  /** What is sent on in place of it. */
  rewrite?(text: string): string;
  /** Whose session a request gets: its own, the next of all, or that of an old snapshot. */
  route?(
    request: Request,
    link: { readonly inTransaction: boolean; readonly wrote: boolean },
  ): "own" | "next" | "stale";
  /** Answers that are given again, by the text of the request. */
  remembers?(request: Request, inTransaction: boolean): boolean;
  /** Messages of the server that are kept back. */
  swallows?(type: string): boolean;
  /** The word for what was done, in place of the server's. */
  tag?(tag: string): string;
}

const select = /^\s*SELECT\b/i;
const locking = /\bFOR\s+(?:NO KEY\s+)?(?:UPDATE|SHARE)\b/i;
/** Of tables, without a lock and without a function of the server's. */
const plainRead = (text: string): boolean =>
  select.test(text) && /\bFROM\s+\S*holdfast_certify/i.test(text) && !locking.test(text);

const asked = "pg_catalog.current_setting('transaction_isolation')";

/** The key that Holdfast's own first look takes: with it the lie is well hidden. */
const firstLook = "((1751936868::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) 1718186867)";

/** Names of functions that exist in the schema `lying`, with other bodies. */
const otherwise = (text: string): string =>
  text.replaceAll(/\bpg_catalog\.(pg_(?:try_)?advisory_(?:xact_)?(?:un)?lock(?:_shared)?\()/g, "lying.$1");

export const lies: readonly Lie[] = [
  {
    name: "reads are cached",
    like: "Hyperdrive with its cache, caching proxies",
    caught: ["committed", "history-counter"],
    remembers: ({ text }, inTransaction) => !inTransaction && plainRead(text),
  },
  {
    name: "reads go to a stale copy",
    like: "a proxy that splits reads, a standby that lags",
    caught: ["committed", "history-register"],
    route: ({ text }, { inTransaction }) => (!inTransaction && plainRead(text) ? "stale" : "own"),
  },
  {
    name: "reads of a transaction go to a stale copy until it writes",
    like: "pgpool-II, which judges a message by its first statement",
    caught: ["lock-then-read", "history-counter"],
    route: ({ text }, { inTransaction, wrote }) =>
      inTransaction && !wrote && plainRead(text) ? "stale" : "own",
  },
  {
    name: "advisory locks are taken by nobody",
    like: "CockroachDB before they were there, YugabyteDB with them turned off",
    caught: ["session-lock", "shared-locks"],
    verdict: "absent",
    rewrite: otherwise,
  },
  {
    name: "advisory locks are of one node",
    like: "Citus, pgpool-II with several primaries",
    caught: ["lock-excludes", "history-counter"],
    rewrite: (text) => (text.includes(firstLook) ? text : otherwise(text).replaceAll("lying.", "node.")),
  },
  {
    name: "READ COMMITTED is a snapshot",
    like: "YugabyteDB without yb_enable_read_committed_isolation",
    caught: ["lock-then-read", "read-committed"],
    rewrite: (text) =>
      text
        .replace("ISOLATION LEVEL READ COMMITTED", "ISOLATION LEVEL REPEATABLE READ")
        .replaceAll(asked, "'read committed'"),
  },
  {
    name: "every transaction is READ COMMITTED",
    like: "a proxy that rewrites BEGIN",
    caught: ["repeatable-read", "serializable"],
    rewrite: (text) =>
      text.replace(/ISOLATION LEVEL (?:REPEATABLE READ|SERIALIZABLE)/, "ISOLATION LEVEL READ COMMITTED"),
  },
  {
    name: "SERIALIZABLE is REPEATABLE READ, and is told as asked",
    like: "engines whose serializable is snapshot isolation",
    caught: ["serializable"],
    rewrite: (text) =>
      text.startsWith("BEGIN ISOLATION LEVEL SERIALIZABLE")
        ? text.replace("SERIALIZABLE", "REPEATABLE READ")
        : text.replaceAll(asked, "'serializable'"),
  },
  {
    name: "sessions are swapped between transactions",
    like: "a pooler in transaction mode",
    caught: ["session-stays", "session-lock", "notify"],
    verdict: "absent",
    route: (_, { inTransaction }) => (inTransaction ? "own" : "next"),
  },
  {
    name: "sessions are swapped between statements",
    like: "a pooler in statement mode that lets BEGIN through",
    caught: ["transactions"],
    route: () => "next",
  },
  {
    name: "each statement commits by itself",
    like: "a pooler in statement mode that swallows BEGIN",
    caught: ["transactions", "lock-excludes"],
    rewrite: (text) =>
      text
        .replace(/^BEGIN[^;]*/, "SELECT 1")
        .replace(/^(?:COMMIT|ROLLBACK)$/, "SELECT 1")
        .replaceAll("SET LOCAL", "SET"),
  },
  {
    name: "COMMIT is a ROLLBACK",
    like: "a proxy that answers before the server",
    caught: ["committed", "commit-outcome"],
    rewrite: (text) => text.replace(/^COMMIT$/, "ROLLBACK"),
    tag: (tag) => tag.replace("ROLLBACK", "COMMIT"),
  },
  {
    name: "ROLLBACK is a COMMIT",
    like: "a proxy that loses what it cannot parse",
    caught: ["transactions", "unique"],
    rewrite: (text) => text.replace(/^ROLLBACK$/, "COMMIT"),
    tag: (tag) => tag.replace("COMMIT", "ROLLBACK"),
  },
  {
    name: "FOR UPDATE locks nothing",
    like: "engines that parse it, and leave it at that",
    caught: ["row-lock", "skip-locked"],
    rewrite: (text) => text.replace(/ FOR UPDATE(?: NOWAIT| SKIP LOCKED)?/, ""),
  },
  {
    name: "SKIP LOCKED waits",
    like: "engines that ignore it",
    caught: ["skip-locked"],
    rewrite: (text) => text.replace(" SKIP LOCKED", ""),
  },
  {
    name: "SKIP LOCKED skips, and locks nothing",
    like: "TiDB",
    caught: ["skip-locked"],
    rewrite: (text) => (text.includes(" SKIP LOCKED") ? unlocked(text) : text),
  },
  {
    name: "savepoints are ignored",
    like: "proxies and engines without nested transactions",
    caught: ["savepoints"],
    rewrite: (text) =>
      /^(?:SAVEPOINT|ROLLBACK TO SAVEPOINT|RELEASE SAVEPOINT)\b/.test(text) ? "SELECT 1" : text,
  },
  {
    name: "lock_timeout is ignored",
    like: "engines that know the setting by name only",
    caught: ["waits-end"],
    rewrite: (text) => text.replace(/SET LOCAL lock_timeout = \d+/, "SELECT 1"),
  },
  {
    name: "limits of transactions are ignored",
    like: "engines that know the setting by name only",
    caught: ["server-deadline"],
    rewrite: (text) => text.replace(/SET LOCAL idle_in_transaction_session_timeout = \d+/, "SELECT 1"),
  },
  {
    name: "every transaction is said to be committed",
    like: "engines without pg_xact_status",
    caught: ["commit-outcome"],
    rewrite: (text) => text.replace(/pg_catalog\.pg_xact_status\('[^']*'::pg_catalog\.xid8\)/, "'committed'"),
  },
  {
    name: "each session has a clock of its own",
    like: "nodes of a cluster whose clocks differ",
    caught: ["clock"],
    rewrite: (text) =>
      text.replaceAll(
        "pg_catalog.clock_timestamp()",
        "(clock_timestamp() + pg_backend_pid() % 1000 * interval '1 minute')",
      ),
  },
  {
    name: "NOTIFY is swallowed",
    like: "poolers and proxies",
    caught: ["notify"],
    swallows: (type) => type === "A",
  },
  {
    name: "there are no routines",
    like: "Vitess, Aurora DSQL",
    caught: ["procedures"],
    rewrite: (text) => (text.startsWith("CREATE FUNCTION") ? "CREATE FUNCTION not supported" : text),
  },
];

/** The ids that are not locked, by a function that gives its locks back before it answers. */
function unlocked(text: string): string {
  const [, table, ids] = /(\S*holdfast_certify_\w+"?) WHERE id IN \(([\d,]+)\)/.exec(text) ?? [];
  return `SELECT id FROM lying.free('${table}', ARRAY[${ids}]) id ORDER BY id`;
}

/** Functions of the same names that do nothing (`lying`), or take the lock of another key in each session (`node`). */
function otherFunctions(): string {
  const made: string[] = ["CREATE SCHEMA IF NOT EXISTS lying", "CREATE SCHEMA IF NOT EXISTS node"];
  for (const args of ["bigint", "integer, integer"]) {
    const given = args === "bigint" ? "($1 # pg_backend_pid())" : "($1 # pg_backend_pid()), $2";
    for (const shared of ["", "_shared"]) {
      for (const scope of ["", "xact_"]) {
        const [tryLock, lock] = [
          `pg_try_advisory_${scope}lock${shared}`,
          `pg_advisory_${scope}lock${shared}`,
        ];
        made.push(
          `CREATE OR REPLACE FUNCTION lying.${tryLock}(${args}) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
          `CREATE OR REPLACE FUNCTION lying.${lock}(${args}) RETURNS void LANGUAGE sql AS 'SELECT NULL'`,
          `CREATE OR REPLACE FUNCTION node.${tryLock}(${args}) RETURNS boolean LANGUAGE sql AS 'SELECT pg_catalog.${tryLock}(${given})'`,
          `CREATE OR REPLACE FUNCTION node.${lock}(${args}) RETURNS void LANGUAGE sql AS 'SELECT pg_catalog.${lock}(${given})'`,
        );
      }
      const unlock = `pg_advisory_unlock${shared}`;
      made.push(
        `CREATE OR REPLACE FUNCTION lying.${unlock}(${args}) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
        `CREATE OR REPLACE FUNCTION node.${unlock}(${args}) RETURNS boolean LANGUAGE sql AS 'SELECT pg_catalog.${unlock}(${given})'`,
      );
    }
  }
  made.push(`CREATE OR REPLACE FUNCTION lying.free(place text, ids integer[]) RETURNS SETOF integer LANGUAGE plpgsql AS $$
    DECLARE found integer[];
    BEGIN
      BEGIN
        EXECUTE format('SELECT array_agg(id) FROM (SELECT id FROM %s WHERE id = ANY($1) FOR UPDATE SKIP LOCKED) s', place)
          INTO found USING ids;
        RAISE EXCEPTION 'give them back';
      EXCEPTION WHEN raise_exception THEN NULL;
      END;
      RETURN QUERY SELECT unnest(found);
    END $$`);
  return made.join(";\n");
}

export interface LyingProxy {
  /** The same database, by way of the proxy. */
  readonly url: string;
  /** Undefined: the truth. */
  lie: Lie | undefined;
  close(): Promise<void>;
}

/** In front of one database, which gets functions to lie with. */
export async function startLyingProxy(target: string): Promise<LyingProxy> {
  const admin = new Client({ connectionString: target });
  await admin.connect();
  await admin.query(otherFunctions());
  await admin.end();
  const links = new Set<Link>();
  const house: House = {
    target,
    lie: undefined,
    memory: new Map(),
    ring: [],
    turn: 0,
    everywhere: false,
    stale: undefined,
  };
  const server: Server = createServer({ noDelay: true }, (socket) => {
    const link = new Link(house, socket, () => links.delete(link));
    links.add(link);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as { port: number };
  const url = new URL(target);
  url.hostname = "127.0.0.1";
  url.port = String(port);
  const reset = (): void => {
    for (const each of house.ring) each.end();
    house.stale?.end();
    house.ring = [];
    house.stale = undefined;
    house.memory.clear();
  };
  return {
    url: url.href,
    get lie() {
      return house.lie;
    },
    set lie(lie) {
      reset();
      house.lie = lie;
      house.everywhere =
        lie?.route?.({ messages: [], text: "" }, { inTransaction: true, wrote: false }) === "next";
    },
    async close() {
      for (const link of links) link.end();
      reset();
      await new Promise<void>((resolve) => server.close(() => resolve()));
    },
  };
}

interface House {
  readonly target: string;
  lie: Lie | undefined;
  readonly memory: Map<string, Buffer>;
  /** Sessions that are lent out in turn. */
  ring: Backend[];
  turn: number;
  /** They are, whatever transactions they are in. */
  everywhere: boolean;
  /** One that sees what was there when a question was first asked. */
  stale: StaleCopy | undefined;
}

/** A session of the server, whose bytes are read here and by nobody else. */
export class Backend {
  readonly #client: Client;
  readonly #socket: Socket;
  #pending: Buffer = Buffer.alloc(0);
  #receive: ((message: Message) => void) | undefined;
  /** Requests of several clients, one after the other. */
  #busy: Promise<unknown> = Promise.resolve();
  #ended = false;

  private constructor(client: Client) {
    this.#client = client;
    // pg has logged in; from here on its socket is ours.
    this.#socket = (client as unknown as { connection: { stream: Socket } }).connection.stream;
    this.#socket.removeAllListeners("data");
    this.#socket.on("data", (chunk: Buffer) => this.#read(chunk));
    this.#socket.on("error", () => {});
  }

  static async open(target: string): Promise<Backend> {
    const client = new Client({ connectionString: target });
    client.on("error", () => {});
    await client.connect();
    return new Backend(client);
  }

  #read(chunk: Buffer): void {
    this.#pending = Buffer.concat([this.#pending, chunk]);
    while (this.#pending.length >= 5) {
      const length = 1 + this.#pending.readUInt32BE(1);
      if (this.#pending.length < length) return;
      const message = {
        type: String.fromCharCode(this.#pending[0] ?? 0),
        body: this.#pending.subarray(5, length),
      };
      this.#pending = this.#pending.subarray(length);
      (this.#receive ?? this.idle)?.(message);
    }
  }

  /** In the middle of whose transaction it is. */
  owner: object | undefined;

  get dead(): boolean {
    return this.#ended || this.#socket.destroyed;
  }

  /** Told of what comes while nobody has asked: notifications. */
  idle: ((message: Message) => void) | undefined;
  /** Told when the server has ended it. */
  set gone(told: () => void) {
    this.#socket.on("close", told);
  }

  /** Passes each message of the answer on; resolves to the state that comes with the last one. */
  ask(messages: readonly Message[], pass: (message: Message) => void): Promise<string> {
    const asked = this.#busy.then(() => this.#ask(messages, pass));
    this.#busy = asked.catch(() => {});
    return asked;
  }

  #ask(messages: readonly Message[], pass: (message: Message) => void): Promise<string> {
    return new Promise((resolve, reject) => {
      const onClose = (): void => reject(new Error("the server has ended this session"));
      if (this.dead) return onClose();
      this.#socket.once("close", onClose);
      this.#receive = (message) => {
        pass(message);
        if (message.type !== "Z") return;
        this.#receive = undefined;
        this.#socket.off("close", onClose);
        resolve(message.body.toString("latin1"));
      };
      for (const message of messages) this.#socket.write(encoded(message));
    });
  }

  /** What else belongs to the question that is being answered. */
  send(messages: readonly Message[]): void {
    for (const message of messages) this.#socket.write(encoded(message));
  }

  end(): void {
    this.#ended = true;
    this.#socket.destroy();
    void this.#client;
  }
}

/** Answers each question as of when it was first asked. */
class StaleCopy {
  readonly #target: string;
  readonly #byText = new Map<string, Promise<Backend>>();

  constructor(target: string) {
    this.#target = target;
  }

  for(text: string): Promise<Backend> {
    let found = this.#byText.get(text);
    if (!found) {
      found = Backend.open(this.#target).then(async (backend) => {
        await backend.ask([query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")], () => {});
        return backend;
      });
      this.#byText.set(text, found);
    }
    return found;
  }

  end(): void {
    for (const each of this.#byText.values()) void each.then((backend) => backend.end());
  }
}

export const encoded = ({ type, body }: Message): Buffer => {
  const head = Buffer.alloc(5);
  head.write(type, 0, "latin1");
  head.writeUInt32BE(body.length + 4, 1);
  return Buffer.concat([head, body]);
};

const query = (text: string): Message => ({ type: "Q", body: Buffer.from(`${text}\0`) });

/** One client. */
class Link {
  readonly #house: House;
  readonly #socket: Socket;
  readonly #own: Promise<Backend>;
  #pending: Buffer = Buffer.alloc(0);
  #started = false;
  #batch: Message[] = [];
  #inTransaction = false;
  #wrote = false;
  #current: Backend | undefined;
  #queue: Promise<unknown> = Promise.resolve();

  constructor(house: House, socket: Socket, closed: () => void) {
    this.#house = house;
    this.#socket = socket;
    this.#own = Backend.open(house.target);
    this.#own.then(
      (backend) => {
        backend.idle = (message) => this.#pass(message);
        backend.gone = () => socket.destroy();
        if (socket.destroyed) backend.end();
      },
      () => socket.destroy(),
    );
    socket.on("data", (chunk) => this.#read(chunk));
    socket.on("error", () => {});
    socket.on("close", () => {
      this.end();
      closed();
    });
  }

  end(): void {
    this.#socket.destroy();
    void this.#own.then((backend) => backend.end()).catch(() => {});
    // What it has begun on sessions that others get next would keep them waiting.
    const { everywhere, ring } = this.#house;
    for (const each of ring.filter(({ owner }) => everywhere || owner === this)) {
      each.owner = undefined;
      void each.ask([query("ROLLBACK")], () => {}).catch(() => {});
    }
  }

  #read(chunk: Buffer): void {
    this.#pending = Buffer.concat([this.#pending, chunk]);
    for (;;) {
      const head = this.#started ? 1 : 0;
      if (this.#pending.length < head + 4) return;
      const length = head + this.#pending.readUInt32BE(head);
      if (this.#pending.length < length) return;
      const type = this.#started ? String.fromCharCode(this.#pending[0] ?? 0) : "";
      const body = Buffer.from(this.#pending.subarray(head + 4, length));
      this.#pending = this.#pending.subarray(length);
      if (!this.#started) this.#start(body);
      else this.#message({ type, body });
    }
  }

  #start(body: Buffer): void {
    const code = body.readUInt32BE(0);
    // SSLRequest, GSSENCRequest: no. A cancel has nothing to reach here.
    if (code === 80877103 || code === 80877104) return void this.#socket.write("N");
    if (code === 80877102) return void this.#socket.destroy();
    this.#started = true;
    const ok = Buffer.alloc(4);
    const key = Buffer.alloc(8);
    for (const message of [
      { type: "R", body: ok },
      { type: "S", body: Buffer.from("client_encoding\0UTF8\0") },
      { type: "S", body: Buffer.from("server_version\x0018.0\0") },
      { type: "K", body: key },
      { type: "Z", body: Buffer.from("I") },
    ])
      this.#socket.write(encoded(message));
  }

  #message(message: Message): void {
    if (message.type === "X") return void this.#socket.end();
    this.#batch.push(message);
    if (message.type !== "Q" && message.type !== "S") return;
    const messages = this.#batch;
    this.#batch = [];
    this.#queue = this.#queue.then(() => this.#answer(messages)).catch(() => this.#socket.destroy());
  }

  async #answer(asked: readonly Message[]): Promise<void> {
    const { lie } = this.#house;
    const messages = asked.map((message) => this.#rewritten(message));
    const request: Request = { messages, text: textOf(asked) };
    // A copy elsewhere would not keep a table from being dropped.
    if (request.text.includes("DROP TABLE")) {
      this.#house.stale?.end();
      this.#house.stale = undefined;
    }
    const remembers = lie?.remembers?.(request, this.#inTransaction) ?? false;
    const known = remembers ? this.#house.memory.get(request.text) : undefined;
    if (known) return void this.#socket.write(known);
    const backend = await this.#backend(request);
    const kept: Buffer[] = [];
    const state = await backend.ask(messages, (message) => {
      // Of a copy's transaction nobody knows.
      const ready = message.type === "Z" && backend !== this.#current;
      kept.push(
        this.#pass(ready ? { type: "Z", body: Buffer.from(this.#inTransaction ? "T" : "I") } : message),
      );
    });
    if (remembers) this.#house.memory.set(request.text, Buffer.concat(kept));
    // What a copy says of its own transaction is not this one's.
    if (this.#current === backend) this.#inTransaction = state !== "I";
    if (!this.#inTransaction) backend.owner = undefined;
    if (!this.#inTransaction) this.#wrote = false;
    else if (/\b(?:UPDATE|INSERT)\b/.test(request.text)) this.#wrote = true;
  }

  async #backend(request: Request): Promise<Backend> {
    const route =
      this.#house.lie?.route?.(request, { inTransaction: this.#inTransaction, wrote: this.#wrote }) ?? "own";
    if (route === "stale") {
      this.#house.stale ??= new StaleCopy(this.#house.target);
      return this.#house.stale.for(request.text);
    }
    if (route === "own" && this.#inTransaction && this.#current) return this.#current;
    if (route === "own") return (this.#current = await this.#own);
    return (this.#current = await this.#next());
  }

  /** The next in turn: one that is in nobody's transaction, unless that does not matter to the lie. */
  async #next(): Promise<Backend> {
    const house = this.#house;
    house.ring = house.ring.filter(({ dead }) => !dead);
    const free = (): Backend[] => (house.everywhere ? house.ring : house.ring.filter(({ owner }) => !owner));
    while (house.ring.length < 5 || free().length < 2) house.ring.push(await Backend.open(house.target));
    const all = free();
    const chosen = all[++house.turn % all.length] as Backend;
    chosen.owner = this;
    return chosen;
  }

  /** Returns what the client got. */
  #pass(message: Message): Buffer {
    const { lie } = this.#house;
    let { body } = message;
    if (lie?.swallows?.(message.type)) return Buffer.alloc(0);
    if (message.type === "C" && lie?.tag)
      body = Buffer.from(`${lie.tag(body.subarray(0, -1).toString("latin1"))}\0`, "latin1");
    const bytes = encoded({ type: message.type, body });
    this.#socket.write(bytes);
    return bytes;
  }

  #rewritten(message: Message): Message {
    const rewrite = this.#house.lie?.rewrite;
    if (!rewrite || (message.type !== "Q" && message.type !== "P")) return message;
    const start = message.type === "Q" ? 0 : message.body.indexOf(0) + 1;
    const end = message.body.indexOf(0, start);
    const text = Buffer.from(rewrite(message.body.subarray(start, end).toString("utf8")));
    return {
      type: message.type,
      body: Buffer.concat([message.body.subarray(0, start), text, message.body.subarray(end)]),
    };
  }
}

function textOf(messages: readonly Message[]): string {
  const found = messages.find(({ type }) => type === "Q" || type === "P");
  if (!found) return "";
  const start = found.type === "Q" ? 0 : found.body.indexOf(0) + 1;
  return found.body.subarray(start, found.body.indexOf(0, start)).toString("utf8");
}
