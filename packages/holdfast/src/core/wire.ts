/** What a server and its clients say to each other, as far as tests that hold statements back must understand it. */
import type { Connection } from "./database.ts";

/** Both directions of one connection. */
export interface WireReader {
  /** The statement that begins with what the client sends here; undefined: none, it belongs to what came before. */
  sent(chunk: Uint8Array): string | undefined;
  received(chunk: Uint8Array): Answer;
}

export interface Answer {
  /** The session waits for the next statement. */
  readonly ready: boolean;
  /** Rows that were read, as text. */
  readonly rows: readonly (readonly string[])[];
  readonly error?: string | undefined;
}

export interface Wire<C extends Connection> {
  reader(): WireReader;
  /** Of the sessions of these local ports, those that wait for a lock: and for which of them. */
  waiting(connection: C, ports: readonly number[]): Promise<ReadonlyMap<number, readonly number[]>>;
}
