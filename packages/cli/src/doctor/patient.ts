/** A server as the checks see it, whichever kind it is of. */
import type { Row, Server, Session } from "../server.ts";
import type { Finding } from "./check.ts";

export interface Patient {
  readonly server: Server;
  /** "PostgreSQL 18.4". */
  readonly title: string;
  readonly version: string;
  /** Reads, within bounds. */
  look(text: string, values?: readonly unknown[]): Promise<Row[]>;
  /** A session of its own, within bounds as far as it does not change what other clients of a pooler get. */
  session(): Promise<Session>;
  /** What keeps a check from looking: rights, or the server's state. Undefined: it is another kind of error. */
  hindrance(error: unknown): Finding | undefined;
  /** After a check that had to be given up: drops what its connection still does. Throws if the server does not answer. */
  renew(): Promise<void>;
}
