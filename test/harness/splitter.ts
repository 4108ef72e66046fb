/**
 * What may stand between a client and a PostgreSQL with a standby. A splitter sends reads outside of transactions to the standby, or answers
 * them from a cache. A balancer leads each connection to one of the servers.
 */
import { type Socket, connect, createServer } from "node:net";
import { setImmediate, setTimeout as sleep } from "node:timers/promises";
import { Backend, type Message, encoded } from "./lying-proxy.ts";

export interface Splitter {
  /** The database, by way of the splitter. */
  readonly url: string;
  /** Who answers what only reads, outside of transactions. */
  reads: "primary" | "standby" | "turns";
  /** Whether an answer to such a statement is given again to whoever sends it with the same values. */
  caches: boolean;
  /** What the standby has answered without an error. */
  readonly answered: string[];
  /** What was answered from the cache. */
  readonly repeated: string[];
  close(): Promise<void>;
}

export const reading = /^\s*(?:SELECT|WITH|VALUES|TABLE)\b/i;
export const writing =
  /\b(?:INSERT\s+INTO|UPDATE\s+\S+\s+\S*\s*SET|DELETE\s+FROM|FOR\s+(?:NO\s+KEY\s+)?UPDATE|FOR\s+(?:KEY\s+)?SHARE|LOCK\s+IN\s+SHARE\s+MODE)\b/i;
/** Longer than any test takes. */
const cachedMs = 600_000;

export async function startSplitter(servers: { primary: string; standby: string }): Promise<Splitter> {
  const links = new Set<Link>();
  const house: House = {
    ...servers,
    reads: "primary",
    caches: false,
    answered: [],
    repeated: [],
    turn: 0,
    cache: new Map(),
  };
  const server = createServer({ noDelay: true }, (socket) => {
    const link = new Link(house, socket, () => links.delete(link));
    links.add(link);
  });
  const url = await listening(server, servers.primary);
  return Object.assign(house, {
    url,
    async close() {
      for (const link of links) link.end();
      await new Promise<void>((resolve) => server.close(() => resolve()));
    },
  });
}

/** Listens on this machine alone. Resolves to the address `of`, by way of it. */
export async function listening(server: ReturnType<typeof createServer>, of: string): Promise<string> {
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const url = new URL(of);
  url.hostname = "127.0.0.1";
  url.port = String((server.address() as { port: number }).port);
  return url.href;
}

interface House extends Pick<Splitter, "reads" | "caches" | "answered" | "repeated"> {
  readonly primary: string;
  readonly standby: string;
  readonly cache: Map<string, { readonly answer: Buffer; readonly until: number }>;
  turn: number;
}

/** What is sent up to a Sync. It is asked when the first of it is wanted (Flush). */
interface Unit {
  readonly messages: Message[];
  whole: boolean;
  begun: boolean;
  /** There is more of it. */
  more(): void;
}

/** A session of a server, and the statements that it has prepared. */
interface Session {
  readonly backend: Backend;
  readonly prepared: Set<string>;
}

/** One client, with a session on each server. */
class Link {
  readonly #house: House;
  readonly #socket: Socket;
  readonly #primary: Promise<Session>;
  readonly #standby: Promise<Session>;
  /** What the client has prepared, by the names that it gave. */
  readonly #parsed = new Map<string, Message>();
  #pending: Buffer = Buffer.alloc(0);
  #started = false;
  #unit: Unit | undefined;
  #inTransaction = false;
  #queue: Promise<unknown> = Promise.resolve();

  constructor(house: House, socket: Socket, closed: () => void) {
    this.#house = house;
    this.#socket = socket;
    this.#primary = this.#open(house.primary);
    this.#standby = this.#open(house.standby);
    socket.on("data", (chunk: Buffer) => this.#read(chunk));
    socket.on("error", () => {});
    socket.on("close", () => {
      this.end();
      closed();
    });
  }

  #open(target: string): Promise<Session> {
    const opened = Backend.open(target).then((backend): Session => {
      backend.idle = (message) => this.#socket.write(encoded(message));
      backend.gone = () => this.#socket.destroy();
      if (this.#socket.destroyed) backend.end();
      return { backend, prepared: new Set() };
    });
    opened.catch(() => this.#socket.destroy());
    return opened;
  }

  end(): void {
    this.#socket.destroy();
    for (const session of [this.#primary, this.#standby])
      void session.then(({ backend }) => backend.end()).catch(() => {});
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
    // SSLRequest, GSSENCRequest: no. Of a cancel request nobody knows whose it is.
    if (code === 80877103 || code === 80877104) return void this.#socket.write("N");
    if (code === 80877102) return void this.#socket.destroy();
    this.#started = true;
    for (const message of [
      { type: "R", body: Buffer.alloc(4) },
      { type: "S", body: Buffer.from("client_encoding\0UTF8\0") },
      { type: "S", body: Buffer.from("server_version\x0018.0\0") },
      { type: "K", body: Buffer.alloc(8) },
      { type: "Z", body: Buffer.from("I") },
    ])
      this.#socket.write(encoded(message));
  }

  #message(message: Message): void {
    if (message.type === "X") return void this.#socket.end();
    const unit = (this.#unit ??= { messages: [], whole: false, begun: false, more: () => {} });
    unit.messages.push(message);
    unit.whole = message.type === "Q" || message.type === "S";
    if (unit.whole) this.#unit = undefined;
    else if (message.type !== "H") return;
    if (unit.begun) return unit.more();
    unit.begun = true;
    this.#queue = this.#queue.then(() => this.#answer(unit)).catch(() => this.#socket.destroy());
  }

  async #answer(unit: Unit): Promise<void> {
    const { messages } = unit;
    const house = this.#house;
    for (const message of messages)
      if (message.type === "P") this.#parsed.set(textsOf(message.body, 1)[0] as string, message);
    const text = this.#textOf(messages);
    const reads = !this.#inTransaction && reading.test(text) && !writing.test(text);
    const name = reads && house.caches && unit.whole ? nameOf(text, messages) : undefined;
    const known = name === undefined ? undefined : house.cache.get(name);
    if (known && known.until > Date.now()) {
      house.repeated.push(text);
      return void this.#socket.write(known.answer);
    }
    const elsewhere =
      reads && (house.reads === "standby" || (house.reads === "turns" && ++house.turn % 2 === 0));
    const session = await (elsewhere ? this.#standby : this.#primary);
    const missing = this.#missing(session, messages);
    const answer: Buffer[] = [];
    let failed = false;
    let left = missing.length;
    let sent = messages.length;
    const asked = session.backend.ask([...missing, ...messages], (message) => {
      // That a statement was prepared which the client has prepared elsewhere is not for the client.
      if (message.type === "1" && left > 0) return void left--;
      failed ||= message.type === "E";
      const bytes = encoded(message);
      answer.push(bytes);
      this.#socket.write(bytes);
    });
    unit.more = () => {
      session.backend.send(messages.slice(sent));
      sent = messages.length;
    };
    const state = await asked;
    if (failed) session.prepared.clear();
    if (elsewhere && !failed) house.answered.push(text);
    if (!elsewhere) this.#inTransaction = state !== "I";
    if (name !== undefined && !failed)
      house.cache.set(name, { answer: Buffer.concat(answer), until: Date.now() + cachedMs });
  }

  /** The text of the first statement. */
  #textOf(messages: readonly Message[]): string {
    const first = messages.find(({ type }) => type === "Q" || type === "P" || type === "B");
    if (!first) return "";
    if (first.type === "Q") return textsOf(first.body, 1)[0] as string;
    const parsed = first.type === "P" ? first : this.#parsed.get(textsOf(first.body, 2)[1] as string);
    return parsed ? (textsOf(parsed.body, 2)[1] as string) : "";
  }

  /** What has to be prepared on this server before. */
  #missing({ prepared }: Session, messages: readonly Message[]): Message[] {
    const missing: Message[] = [];
    for (const { type, body } of messages) {
      if (type === "P") prepared.add(textsOf(body, 1)[0] as string);
      const name =
        type === "B"
          ? textsOf(body, 2)[1]
          : type === "D" && body[0] === 0x53
            ? textsOf(body.subarray(1), 1)[0]
            : "";
      const parsed = name ? this.#parsed.get(name) : undefined;
      if (!name || !parsed || prepared.has(name)) continue;
      prepared.add(name);
      missing.push(parsed);
    }
    return missing;
  }
}

/** The texts that a message begins with. */
function textsOf(body: Buffer, count: number): string[] {
  const texts: string[] = [];
  for (let start = 0; texts.length < count;) {
    const end = body.indexOf(0, start);
    texts.push(body.subarray(start, end).toString("utf8"));
    start = end + 1;
  }
  return texts;
}

/** Text and values, whatever the statement is called. */
function nameOf(text: string, messages: readonly Message[]): string {
  const parts = messages.map(({ type, body }) => {
    if (type !== "B") return type;
    const names = textsOf(body, 2).reduce((sum, each) => sum + Buffer.byteLength(each) + 1, 0);
    return `B${body.subarray(names).toString("hex")}`;
  });
  return [text, ...parts].join("\0");
}

export interface Balancer {
  readonly url: string;
  /** Where the next connections lead, one after the other. */
  to: readonly string[];
  /** Ends all that are open. Resolves when a pool of this process has heard of it. */
  drop(): Promise<void>;
  close(): Promise<void>;
}

/** Looks at nothing that is sent. */
export async function startBalancer(to: readonly string[]): Promise<Balancer> {
  const open = new Set<Socket>();
  let turn = 0;
  const balancer = { to };
  const server = createServer({ noDelay: true }, (socket) => {
    const { hostname, port } = new URL(balancer.to[turn++ % balancer.to.length] as string);
    const other = connect({ host: hostname, port: Number(port), noDelay: true });
    for (const [one, another] of [
      [socket, other],
      [other, socket],
    ] as const) {
      open.add(one);
      one.pipe(another);
      one.on("error", () => {});
      one.on("close", () => {
        open.delete(one);
        another.destroy();
      });
    }
  });
  const url = await listening(server, to[0] as string);
  const drop = async () => {
    for (const socket of open) socket.destroy();
    await sleep(20);
    // After a pause of the process, timers run before what has arrived is read.
    for (let turn = 0; turn < 10; turn++) await setImmediate();
  };
  return Object.assign(balancer, {
    url,
    drop,
    async close() {
      await drop();
      await new Promise<void>((resolve) => server.close(() => resolve()));
    },
  });
}
