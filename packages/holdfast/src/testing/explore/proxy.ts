/**
 * Stands between an application, in a process of its own, and its database: what passes here can be held back as if the
 * application were in this process.
 */
import { type AddressInfo, type Server, type Socket, connect, createServer, isIP } from "node:net";
import { TLSSocket, connect as connectTls, createSecureContext } from "node:tls";
import type { Connection, Database } from "../../seam/database.ts";
import { UnsupportedError, UsageError } from "../../seam/errors.ts";
import type { Protocol, Relay } from "../../seam/protocol-reader.ts";
import { selfSigned } from "./certificate.ts";
import { current, readAlong, readerOf, send } from "./listen.ts";

export interface ProxyOptions {
  /** Where the application finds it. Default 127.0.0.1. */
  readonly host?: string;
  /** Default: one that is free. */
  readonly port?: number;
  /**
   * For applications that insist on TLS, which ends here: a key and a certificate, as PEM; `true`: one for localhost that is signed by
   * itself, and is `certificate` then.
   */
  readonly tls?: true | { readonly key: string | Uint8Array; readonly cert: string | Uint8Array };
}

/** What of an address is about encryption between the two that it names, which are others now. */
const aboutTls = [
  "sslmode",
  "ssl",
  "sslrootcert",
  "sslcert",
  "sslkey",
  "ssl-mode",
  "sslaccept",
  "channel_binding",
];

/** A proxy for one database, as `proxied` makes it. */
export class Proxy implements AsyncDisposable {
  readonly #relay: Relay;
  readonly #protocol: Pick<Protocol<never>, "reader">;
  readonly #to: URL;
  readonly #options: ProxyOptions;
  readonly #tls: Exclude<ProxyOptions["tls"], true>;
  readonly #server: Server;
  readonly #links = new Set<Socket>();
  readonly #upstream = new WeakSet<Socket>();

  constructor(protocol: Pick<Protocol<never>, "reader"> & { relay: Relay }, to: URL, options: ProxyOptions) {
    this.#relay = protocol.relay;
    this.#protocol = protocol;
    this.#to = to;
    this.#options = options;
    const { tls, host = "127.0.0.1" } = options;
    this.#tls = tls === true ? selfSigned(["localhost", "127.0.0.1", host]) : tls;
    this.#server = createServer({ noDelay: true }, (client) => void this.#link(client));
  }

  async open(): Promise<this> {
    const { host = "127.0.0.1", port = 0 } = this.#options;
    readAlong();
    await new Promise<void>((resolve, reject) => {
      this.#server.once("error", reject);
      this.#server.listen(port, host, resolve);
    });
    // It is in nobody's way who forgets to close it.
    this.#server.unref();
    return this;
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  /** The address of the same database, by way of the proxy. */
  get url(): string {
    const url = new URL(this.#to);
    url.hostname = this.#options.host ?? "127.0.0.1";
    url.port = String(this.port);
    for (const name of aboutTls) url.searchParams.delete(name);
    return url.href;
  }

  /** What an application is to trust that checks whom it is talking to. Undefined: there is no TLS. */
  get certificate(): string | undefined {
    return this.#tls && Buffer.from(this.#tls.cert).toString();
  }

  /** Whether this is a connection of the application's, from here to the server. */
  has(socket: Socket): boolean {
    return this.#upstream.has(socket);
  }

  async close(): Promise<void> {
    for (const socket of this.#links) socket.destroy();
    await new Promise<void>((resolve) => void this.#server.close(() => resolve()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #link(raw: Socket): Promise<void> {
    this.#keep(raw);
    let upstream: Socket | undefined;
    try {
      upstream = this.#keep(await this.#connect());
      const { client, first } = await this.#greet(raw);
      this.#join(this.#keep(client), upstream, first);
    } catch {
      // The application is told in the way in which it would be told of a server that has gone.
      raw.destroy();
      upstream?.destroy();
    }
  }

  #keep<S extends Socket>(socket: S): S {
    this.#links.add(socket);
    // What there is to be said of it is said by "close".
    socket.on("error", () => {});
    socket.once("close", () => this.#links.delete(socket));
    return socket;
  }

  async #connect(): Promise<Socket> {
    const { hostname, port, searchParams } = this.#to;
    const host = decodeURIComponent(hostname).replace(/^\[(.*)\]$/, "$1") || "127.0.0.1";
    const raw = connect({ host, port: Number(port) || this.#relay.port, noDelay: true });
    await happens(raw, "connect");
    const mode = searchParams.get("sslmode") ?? "disable";
    const { encryption } = this.#relay;
    if (!encryption || ["disable", "allow", "prefer"].includes(mode)) return raw;
    send(raw, encryption.request);
    const answer = await heard(raw);
    if (!encryption.granted.every((byte, i) => answer[i] === byte)) throw new Error("the server has no TLS");
    const checked = mode.startsWith("verify");
    const secure = connectTls({
      socket: raw,
      host,
      // An address is no name.
      ...(isIP(host) === 0 && { servername: host }),
      rejectUnauthorized: checked,
    });
    await happens(secure, "secureConnect");
    return secure;
  }

  /** Until the client says what is the server's business. */
  async #greet(raw: Socket): Promise<{ client: Socket; first: Uint8Array }> {
    const { encryption } = this.#relay;
    const tls = this.#tls;
    if (!encryption) return { client: raw, first: Buffer.alloc(0) };
    for (;;) {
      let first = await heard(raw);
      while (first.length < encryption.request.length) first = Buffer.concat([first, await heard(raw)]);
      const asked = encryption.asked(first);
      if (asked === undefined) return { client: raw, first };
      if (asked === "tls" && tls) {
        send(raw, encryption.granted);
        const secureContext = createSecureContext({ key: buffer(tls.key), cert: buffer(tls.cert) });
        const client = new TLSSocket(raw, { isServer: true, secureContext });
        await happens(client, "secure");
        return { client, first: Buffer.alloc(0) };
      }
      send(raw, encryption.denied);
    }
  }

  #join(client: Socket, upstream: Socket, first: Uint8Array): void {
    const cut = this.#relay.cutter();
    const listener = this.#relay.listener?.();
    this.#upstream.add(upstream);
    readerOf(upstream, () => this.#protocol.reader());
    // Nobody's: whose it is has to be found out where it is held back; and what the client hears is not to be looked at again.
    const pass = (to: Socket, from: Socket, chunk: Uint8Array): void =>
      current.exit(() => {
        if (chunk.length === 0 || to.destroyed || to.write(chunk)) return;
        from.pause();
        to.once("drain", () => from.resume());
      });
    client.on("data", (chunk: Buffer) => pass(upstream, client, cut(chunk)));
    upstream.on("data", (chunk: Buffer) => pass(client, upstream, listener ? listener(chunk) : chunk));
    client.once("close", () => upstream.destroySoon());
    upstream.once("close", () => client.destroySoon());
    pass(upstream, client, cut(first));
    client.resume();
    upstream.resume();
  }
}

const buffer = (text: string | Uint8Array) => (typeof text === "string" ? text : Buffer.from(text));

/** What is sent next; what comes after it is left for whoever asks then. */
async function heard(socket: Socket): Promise<Buffer> {
  let chunk: Buffer = Buffer.alloc(0);
  const take = (data: Buffer) => {
    chunk = data;
    socket.pause();
  };
  socket.once("data", take);
  const coming = happens(socket, "pause");
  socket.resume();
  await coming.finally(() => socket.off("data", take));
  return chunk;
}

/** Rejects if it is closed before. */
function happens(socket: Socket, event: string): Promise<void> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const gone = (error?: unknown) =>
    reject(error instanceof Error ? error : new Error("the connection was closed"));
  socket.once(event, () => resolve());
  socket.once("error", gone).once("close", gone);
  return promise.finally(() => socket.off("error", gone).off("close", gone));
}

/**
 * Opens a proxy for the database at this address, for `explore({ db, proxy, … })`: an application in another process, in whatever
 * language, that connects to `proxy.url` can be explored by requests to it. `db` is the same database, as an adapter gives it.
 */
export async function proxied(
  db: Database<never, Connection> | Database<any, any>,
  url: string | URL,
  options: ProxyOptions = {},
): Promise<Proxy> {
  const { engine } = db as Database<unknown, Connection>;
  const { protocol } = engine;
  if (!protocol?.relay)
    throw new UnsupportedError(`proxied: statements cannot be held back on ${engine.name} in a proxy`);
  if (!URL.canParse(String(url)) || new URL(url).hostname === "")
    throw new UsageError(
      "proxied: the address of the database is a URL that names a host, where the server has a port",
    );
  return new Proxy({ ...protocol, relay: protocol.relay }, new URL(url), options).open();
}
