/** A splitter of reads and writes, and a cache, between a client and a MySQL or MariaDB with a replica: see `splitter.ts`. */
import { createHash } from "node:crypto";
import { type Socket, connect, createServer } from "node:net";
import { type Splitter, listening, reading, writing } from "./splitter.ts";

/** Commands of the protocol. */
const command = { use: 2, query: 3, ping: 14, reset: 31 };
/** Flags of the client. */
const flags = { secure: 1 << 15, lengths: 1 << 21, deprecateEof: 1 << 24, attributes: 1 << 27 };

type House = Pick<Splitter, "reads" | "caches" | "answered" | "repeated"> & {
  readonly primary: URL;
  readonly standby: URL;
  readonly cache: Map<string, Buffer>;
  turn: number;
};

/** Both have the same users, who have signed in once before: then the server asks for no more than a proof of the password. */
export async function startMysqlSplitter(servers: { primary: string; standby: string }): Promise<Splitter> {
  const links = new Set<Link>();
  const house: House = {
    primary: new URL(servers.primary),
    standby: new URL(servers.standby),
    reads: "primary",
    caches: false,
    answered: [],
    repeated: [],
    cache: new Map(),
    turn: 0,
  };
  const server = createServer({ noDelay: true }, (socket) => {
    const link = new Link(house, socket);
    links.add(link);
    socket.on("close", () => links.delete(link));
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

interface Packet {
  readonly sequence: number;
  readonly body: Buffer;
}

/** Cuts a stream into packets, none of which is larger than 16 MB. */
class Packets {
  #left: Buffer = Buffer.alloc(0);

  *of(chunk: Buffer): Generator<Packet> {
    this.#left = Buffer.concat([this.#left, chunk]);
    while (this.#left.length >= 4) {
      const end = 4 + this.#left.readUIntLE(0, 3);
      if (this.#left.length < end) return;
      const packet = { sequence: this.#left.readUInt8(3), body: this.#left.subarray(4, end) };
      this.#left = this.#left.subarray(end);
      yield packet;
    }
  }
}

/** An integer that says its own length, and where the next thing is. */
function lengthAt(body: Buffer, at: number): [value: number, next: number] {
  const first = body.readUInt8(at);
  if (first < 0xfb) return [first, at + 1];
  const size = first === 0xfc ? 2 : first === 0xfd ? 3 : 6;
  return [body.readUIntLE(at + 1, size), at + 1 + (first === 0xfe ? 8 : size)];
}

/** Of an OK or EOF packet. */
function statusOf(body: Buffer): number {
  if (body[0] === 0xfe && body.length === 5) return body.readUInt16LE(3);
  const [, afterRows] = lengthAt(body, 1);
  return body.readUInt16LE(lengthAt(body, afterRows)[1]);
}

const encoded = ({ sequence, body }: Packet): Buffer => {
  const head = Buffer.alloc(4);
  head.writeUIntLE(body.length, 0, 3);
  head[3] = sequence;
  return Buffer.concat([head, body]);
};

/** A session of a server. */
class Side {
  readonly socket: Socket;
  /** Definitions of columns are followed by an EOF packet. */
  eofs = true;
  inTransaction = false;
  readonly #packets = new Packets();
  readonly #waiting: Packet[] = [];
  #take: ((packet: Packet) => void) | undefined;

  constructor({ hostname, port }: URL, gone: () => void) {
    this.socket = connect({ host: hostname, port: Number(port), noDelay: true });
    this.socket.on("data", (chunk) => {
      for (const packet of this.#packets.of(chunk))
        if (this.#take) this.#take(packet);
        else this.#waiting.push(packet);
    });
    this.socket.on("error", () => {});
    this.socket.on("close", gone);
  }

  /** All that comes, until it says that this was the last. */
  listen(take: (packet: Packet) => boolean): Promise<void> {
    return new Promise((resolve) => {
      this.#take = (packet) => {
        if (!take(packet)) return;
        this.#take = undefined;
        resolve();
      };
      for (let next = this.#waiting.shift(); next; next = this.#waiting.shift()) {
        this.#take?.(next);
        if (!this.#take) break;
      }
    });
  }

  /** The answer to a command. Resolves to whether it was done. */
  async ask(body: Buffer, take: (packet: Packet) => void): Promise<boolean> {
    let fine = true;
    let columns = 0;
    let isHead = true;
    const ends = (answer: Buffer) => {
      const status = statusOf(answer);
      this.inTransaction = (status & 1) !== 0 || (status & 2) === 0;
      isHead = true;
      return (status & 8) === 0;
    };
    const answered = this.listen((packet) => {
      take(packet);
      const [code] = packet.body;
      if (code === 0xff) return !(fine = false);
      if (isHead) {
        if (code === 0x00) return ends(packet.body);
        isHead = false;
        columns = lengthAt(packet.body, 0)[0] + (this.eofs ? 1 : 0);
        return false;
      }
      if (columns > 0) return --columns < 0;
      return code === 0xfe && packet.body.length < 0xffffff && ends(packet.body);
    });
    this.socket.write(encoded({ sequence: 0, body }));
    await answered;
    return fine;
  }
}

/** One client, with a session on each server. */
class Link {
  readonly #house: House;
  readonly #socket: Socket;
  readonly #primary: Side;
  readonly #standby: Side;
  readonly #packets = new Packets();
  /** What the client has said of itself. */
  #introduction = Promise.withResolvers<Buffer>();
  #signedIn = false;
  #flags = 0;
  #queue: Promise<unknown>;

  constructor(house: House, socket: Socket) {
    this.#house = house;
    this.#socket = socket;
    const end = () => this.end();
    this.#primary = new Side(house.primary, end);
    this.#standby = new Side(house.standby, end);
    socket.on("data", (chunk: Buffer) => {
      for (const packet of this.#packets.of(chunk)) this.#heard(packet);
    });
    socket.on("error", () => {});
    socket.on("close", end);
    this.#queue = Promise.all([this.#signIn(), this.#signInToo()]).catch(end);
  }

  end(): void {
    for (const socket of [this.#socket, this.#primary.socket, this.#standby.socket]) socket.destroy();
  }

  /** By the client itself. */
  async #signIn(): Promise<void> {
    await this.#primary.listen((packet) => {
      this.#socket.write(encoded(packet));
      return packet.body[0] === 0x00 || packet.body[0] === 0xff;
    });
    this.#signedIn = true;
  }

  /** The same, with another proof, as the server has asked for another one. */
  async #signInToo(): Promise<void> {
    let greeting: Buffer = Buffer.alloc(0);
    await this.#standby.listen((packet) => {
      greeting = packet.body;
      return true;
    });
    const start = greeting.indexOf(0, 1) + 5;
    const nonce = Buffer.concat([
      greeting.subarray(start, start + 8),
      greeting.subarray(start + 27, start + 39),
    ]);
    const plugin = greeting.toString("latin1", start + 40);
    const able = greeting.readUInt16LE(start + 9) + greeting.readUInt16LE(start + 14) * 65_536;
    const body = await this.#introduction.promise;
    this.#flags = body.readUInt32LE(0) & able;
    for (const side of [this.#primary, this.#standby]) side.eofs = (this.#flags & flags.deprecateEof) === 0;
    if ((this.#flags & (flags.secure | flags.lengths)) === 0) throw new Error("an old client");
    const at = body.indexOf(0, 32) + 1;
    const user = body.subarray(32, at - 1).toString();
    const password = this.#passwordOf(user);
    const prove = (by: string, to: Buffer) => (by.startsWith("caching_sha2") ? sha2 : sha1)(password, to);
    const proof = prove(plugin, nonce);
    const answer = Buffer.concat([
      body.subarray(0, at),
      Buffer.from([proof.length]),
      proof,
      body.subarray(at + 1 + (body[at] as number)),
    ]);
    this.#standby.socket.write(encoded({ sequence: 1, body: answer }));
    await this.#standby.listen(({ sequence, body: said }) => {
      const [code] = said;
      if (code === 0xfe) {
        // Another plugin than the client has named.
        const named = said.indexOf(0, 1);
        const again = prove(said.toString("latin1", 1, named), said.subarray(named + 1, named + 21));
        this.#standby.socket.write(encoded({ sequence: sequence + 1, body: again }));
      } else if (code === 0xff || (code === 0x01 && said[1] !== 0x03)) this.end();
      return code === 0x00;
    });
  }

  #passwordOf(user: string): string {
    const { username, password } = this.#house.standby;
    if (user !== username) throw new Error(`${user} is not known`);
    return password;
  }

  #heard(packet: Packet): void {
    if (!this.#signedIn) {
      if (packet.sequence === 1) this.#introduction.resolve(packet.body);
      return void this.#primary.socket.write(encoded(packet));
    }
    this.#queue = this.#queue.then(() => this.#answer(packet.body)).catch(() => this.end());
  }

  async #answer(body: Buffer): Promise<void> {
    const [code] = body;
    if (code === command.query) return this.#query(body);
    const both = code === command.use || code === command.reset;
    // Our clients prepare nothing.
    if (!both && code !== command.ping) return this.end();
    if (both) await this.#standby.ask(body, () => {});
    await this.#primary.ask(body, (packet) => void this.#socket.write(encoded(packet)));
  }

  async #query(body: Buffer): Promise<void> {
    const house = this.#house;
    const text = body.toString("utf8", (this.#flags & flags.attributes) === 0 ? 1 : 3);
    const reads = !this.#primary.inTransaction && reading.test(text) && !writing.test(text);
    const known = reads && house.caches ? house.cache.get(text) : undefined;
    if (known) {
      house.repeated.push(text);
      return void this.#socket.write(known);
    }
    const elsewhere =
      reads && (house.reads === "standby" || (house.reads === "turns" && ++house.turn % 2 === 0));
    const answer: Buffer[] = [];
    const fine = await (elsewhere ? this.#standby : this.#primary).ask(body, (packet) => {
      const bytes = encoded(packet);
      answer.push(bytes);
      this.#socket.write(bytes);
    });
    if (elsewhere && fine) house.answered.push(text);
    if (reads && house.caches && fine) house.cache.set(text, Buffer.concat(answer));
  }
}

const hash = (name: string, ...parts: (string | Buffer)[]): Buffer => {
  const sum = createHash(name);
  for (const part of parts) sum.update(part);
  return sum.digest();
};

const xor = (a: Buffer, b: Buffer): Buffer => Buffer.from(a.map((byte, i) => byte ^ (b[i] as number)));

/** mysql_native_password */
function sha1(password: string, nonce: Buffer): Buffer {
  const once = hash("sha1", password);
  return xor(once, hash("sha1", nonce, hash("sha1", once)));
}

/** caching_sha2_password */
function sha2(password: string, nonce: Buffer): Buffer {
  const once = hash("sha256", password);
  return xor(once, hash("sha256", hash("sha256", once), nonce));
}
