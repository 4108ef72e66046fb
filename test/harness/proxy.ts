import { createConnection, createServer, type Socket } from "node:net";

export type Direction = "to-server" | "to-client";

/**
 * What to do with a chunk: "pass" it on; "cut-before" it gets there; with "drop-answer", pass it on and cut when the
 * other side answers, so that the answer is lost after the deed is done; "hold" it back and freeze, until `thaw`; or
 * "stall" this connection alone, for good.
 */
export type Verdict = "pass" | "cut-before" | "drop-answer" | "hold" | "stall";

/** A message that ends a transaction: not one that begins one, as READ COMMITTED. */
export function isCommit(chunk: Buffer): boolean {
  return /COMMIT(?!TED)/.test(chunk.toString("latin1"));
}

export interface Proxy {
  readonly port: number;
  /** The same address, by way of the proxy. */
  url(original: string): string;
  /** How long a chunk takes in either direction: a round trip takes twice that. */
  delayMs: number;
  /** How often a client spoke after it had heard the server, or for the first time on its connection. */
  readonly roundTrips: number;
  resetCount(): void;
  /** How many connections were cut, by `cut` or `cutWhen`. */
  readonly cuts: number;
  readonly connections: number;
  /** Resets all connections. */
  cut(): void;
  /** Asks about every chunk that is about to be passed on; undefined ends it. */
  cutWhen(predicate: ((direction: Direction, chunk: Buffer) => Verdict) | undefined): void;
  /** Keeps the connections open, but holds everything back. */
  freeze(): void;
  thaw(): void;
  /** Changes chunks on their way: whole messages, or parts whose length stays. */
  rewrite(change: ((direction: Direction, chunk: Buffer) => Buffer) | undefined): void;
  close(): Promise<void>;
}

export async function startProxy(target: { port: number; host?: string }): Promise<Proxy> {
  const links = new Set<Link>();
  const state: State = {
    delayMs: 0,
    frozen: false,
    roundTrips: 0,
    cuts: 0,
    verdict: () => "pass",
    change: (_, chunk) => chunk,
  };
  const server = createServer({ allowHalfOpen: true, noDelay: true }, (client) => {
    const upstream = createConnection({
      port: target.port,
      host: target.host ?? "127.0.0.1",
      allowHalfOpen: true,
      noDelay: true,
    });
    const link = new Link(state, client, upstream, () => links.delete(link));
    links.add(link);
  });
  await new Promise<void>((resolve, reject) => {
    server.once("error", reject);
    server.listen(0, "127.0.0.1", resolve);
  });
  const address = server.address();
  if (address === null || typeof address === "string") throw new Error("The proxy has no port");
  const { port } = address;
  return {
    port,
    url(original) {
      const url = new URL(original);
      url.hostname = "127.0.0.1";
      url.port = String(port);
      return url.href;
    },
    get delayMs() {
      return state.delayMs;
    },
    set delayMs(value) {
      state.delayMs = value;
    },
    get roundTrips() {
      return state.roundTrips;
    },
    resetCount() {
      state.roundTrips = 0;
    },
    get cuts() {
      return state.cuts;
    },
    get connections() {
      return links.size;
    },
    cut() {
      for (const link of links) link.cut();
    },
    cutWhen(predicate) {
      state.verdict = predicate ?? (() => "pass");
    },
    freeze() {
      state.frozen = true;
    },
    thaw() {
      state.frozen = false;
      for (const link of links) link.resume();
    },
    rewrite(change) {
      state.change = change ?? ((_, chunk) => chunk);
    },
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        for (const link of links) link.destroy();
      }),
  };
}

interface State {
  delayMs: number;
  frozen: boolean;
  roundTrips: number;
  cuts: number;
  verdict(direction: Direction, chunk: Buffer): Verdict;
  change(direction: Direction, chunk: Buffer): Buffer;
}

/** One client's connection, and the one to the server made for it. */
class Link {
  readonly #state: State;
  readonly #sockets: Record<Direction, Socket>;
  readonly #lanes: Lane[];
  readonly #closed: () => void;
  #spoke: Direction | undefined;
  #dropping: Direction | undefined;
  #stalled = false;

  constructor(state: State, client: Socket, upstream: Socket, closed: () => void) {
    this.#state = state;
    this.#sockets = { "to-server": upstream, "to-client": client };
    this.#closed = closed;
    this.#lanes = [this.#join(client, "to-server", upstream), this.#join(upstream, "to-client", client)];
  }

  #join(from: Socket, direction: Direction, to: Socket): Lane {
    const frozen = () => this.#stalled || this.#state.frozen;
    const lane = new Lane(this.#state, frozen, (chunk) => {
      if (chunk !== null) return this.#pass(direction, chunk, to);
      to.end();
      return true;
    });
    from.on("data", (chunk) => {
      if (direction === "to-server" && this.#spoke !== "to-server") this.#state.roundTrips++;
      this.#spoke = direction;
      lane.push(chunk);
    });
    from.on("end", () => lane.push(null));
    from.on("error", () => this.destroy());
    // What is on its way still gets there; a socket that broke has reported an error before.
    from.on("close", () => {
      if (to.destroyed) this.#closed();
    });
    return lane;
  }

  /** False: it is to be kept. */
  #pass(direction: Direction, chunk: Buffer, to: Socket): boolean {
    const verdict = this.#dropping === direction ? "cut-before" : this.#state.verdict(direction, chunk);
    if (verdict === "hold" || verdict === "stall") {
      if (verdict === "hold") this.#state.frozen = true;
      else this.#stalled = true;
      return false;
    }
    if (verdict === "cut-before") {
      this.cut();
      return true;
    }
    if (verdict === "drop-answer") this.#dropping = direction === "to-server" ? "to-client" : "to-server";
    to.write(this.#state.change(direction, chunk));
    return true;
  }

  resume(): void {
    for (const lane of this.#lanes) lane.run();
  }

  cut(): void {
    this.#state.cuts++;
    this.destroy();
  }

  destroy(): void {
    for (const lane of this.#lanes) lane.stop();
    for (const socket of Object.values(this.#sockets)) {
      // A socket that is still connecting has nothing to reset.
      if (socket.connecting) socket.destroy();
      else socket.resetAndDestroy();
    }
    this.#closed();
  }
}

/** One direction of a connection: a queue whose entries come out in order, each after its delay. */
class Lane {
  readonly #state: State;
  readonly #frozen: () => boolean;
  readonly #deliver: (chunk: Buffer | null) => boolean;
  readonly #queue: { due: number; chunk: Buffer | null }[] = [];
  #timer: NodeJS.Timeout | undefined;
  #stopped = false;

  constructor(state: State, frozen: () => boolean, deliver: (chunk: Buffer | null) => boolean) {
    this.#state = state;
    this.#frozen = frozen;
    this.#deliver = deliver;
  }

  /** Null is the end of the stream. */
  push(chunk: Buffer | null): void {
    this.#queue.push({ due: performance.now() + this.#state.delayMs, chunk });
    this.run();
  }

  run(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    for (;;) {
      const head = this.#queue[0];
      if (head === undefined || this.#stopped || this.#frozen()) return;
      const wait = head.due - performance.now();
      if (wait > 0) {
        this.#timer = setTimeout(() => this.run(), wait);
        return;
      }
      this.#queue.shift();
      if (!this.#deliver(head.chunk)) this.#queue.unshift(head);
    }
  }

  stop(): void {
    this.#stopped = true;
    clearTimeout(this.#timer);
  }
}
