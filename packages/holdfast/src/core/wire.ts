/** What a server and its clients say to each other, as far as tests that hold statements back must understand it. */
import type { Connection, Isolation } from "./database.ts";

/** Both directions of one connection. */
export interface WireReader {
  /** The statement that begins with what the client sends here; undefined: none, it belongs to what came before. */
  sent(chunk: Uint8Array): string | undefined;
  received(chunk: Uint8Array): Answer;
  /** A statement has been begun, and the rest of it is still to be sent: after something that the server answers. */
  readonly open?: boolean;
  /** Something that was sent is not answered yet, beside what is held back. */
  readonly busy?: boolean;
  /** The bytes of a statement without values, as this connection takes them; else as `Wire.statement` has them. */
  statement?(text: string): Uint8Array;
  /** What was begun, as it is known by now. */
  text?(): string;
  /** It was prepared before anybody read along: the answer to this statement tells what it is. */
  readonly unknown?: string | undefined;
  learn?(rows: Answer["rows"]): void;
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
  /** The bytes of a statement without values. */
  statement(text: string): Uint8Array;
  /** Of the sessions of these local ports, those that wait for a lock: and for which of them. */
  waiting(connection: C, ports: readonly number[]): Promise<ReadonlyMap<number, readonly number[]>>;
  /** A statement: the session's transactions run at this level; undefined: at its own again. */
  isolation(level: Isolation | undefined): string;
  /**
   * A statement: the session waits so many milliseconds for a lock before it looks for a deadlock, and is the one that
   * is ended if it finds it; undefined: as it was. Absent where the server looks at once, and decides by itself.
   */
  patience?(ms: number | undefined): string;
  /** Tables that are touched together, by foreign keys; with "*" those that may touch any, by triggers. */
  related(connection: C): Promise<readonly (readonly string[])[]>;
  /** Keeps what is in the tables now, to bring back what is written in them. */
  keep?(connection: C): Promise<Kept>;
}

export interface Kept {
  /**
   * Brings back what was written, as often as is wanted; nothing else is touched. Throws if somebody else is at work in this
   * database, whose rows could be lost by it.
   */
  restore(written: Written, ours: OurSessions): Promise<void>;
  forget(): Promise<void>;
}

/** What statements may have written, as far as their text tells. */
export interface Written {
  /** Nothing is known of at least one of them. */
  readonly anything: boolean;
  /** Tables, in lower case, with their schema if it was there: "image", "shop.image". */
  readonly tables: ReadonlySet<string>;
  /** Functions that were called; which of them write, the server knows. */
  readonly calls: ReadonlySet<string>;
  /** Sequences that were asked by name. */
  readonly sequences: ReadonlySet<string>;
}

/** Sessions of this process. */
export interface OurSessions {
  readonly ports: ReadonlySet<number>;
}
