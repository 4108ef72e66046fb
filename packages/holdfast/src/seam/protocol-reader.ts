/** What a server and its clients say to each other, as far as tests that hold statements back must understand it. */
import type { Connection, Isolation } from "./database.ts";

/** In place of a session: a prepared transaction has none, until somebody commits it or rolls it back. */
export const noSession = "0";

/** Both directions of one connection. */
export interface ProtocolReader {
  /** The statement that begins with what the client sends here; undefined: none, it belongs to what came before. */
  sent(chunk: Uint8Array): string | undefined;
  received(chunk: Uint8Array): ProtocolAnswer;
  /** A statement has been begun, and the rest of it is still to be sent: after something that the server answers. */
  readonly open?: boolean;
  /** Requests that the client has made, each with an answer of its own that has not come yet. */
  readonly unanswered: number;
  /** The bytes of a statement without values, as this connection takes them; else as `Wire.statement` has them. */
  statement?(text: string): Uint8Array;
  /** What was begun, as it is known by now. */
  text?(): string;
  /** It was prepared before anybody read along: the answer to this statement tells what it is. */
  readonly unknown?: string | undefined;
  learn?(rows: ProtocolAnswer["rows"]): void;
  /** The session is in a transaction, as the server has said last; undefined: it has not said anything yet. */
  inside: boolean | undefined;
}

export interface ProtocolAnswer {
  /** The session waits for the next statement. */
  readonly ready: boolean;
  /** A statement has been begun, and the server has answered all of it that was sent so far: a cursor whose client reads on later. */
  readonly paused?: boolean;
  /** Rows that were read, as text. */
  readonly rows: readonly (readonly string[])[];
  readonly error?: string | undefined;
  /** The error says that it was ended to end a deadlock. */
  readonly deadlock?: boolean;
  /** Rows that were touched, if the server says it. */
  readonly affected?: number | undefined;
}

export interface Protocol<C extends Connection> {
  reader(): ProtocolReader;
  /** The bytes of a statement without values. */
  statement(text: string): Uint8Array;
  /** A statement whose answer tells who the session is. */
  readonly who: string;
  self(rows: ProtocolAnswer["rows"], localPort: number | undefined): Self | undefined;
  /** Of these sessions, those that wait for a lock: and for which sessions, these or any other. */
  waiting(connection: C, sessions: readonly string[]): Promise<ReadonlyMap<string, readonly string[]>>;
  /** Sessions as people know them: who it is, and what it does. */
  describe(connection: C, sessions: readonly string[]): Promise<readonly string[]>;
  /** Ends what these sessions do; they stay. */
  cancel(connection: C, sessions: readonly string[]): Promise<void>;
  /** Gives back all locks of a session. */
  readonly unlock: string;
  /** How a statement outside of any transaction, which is one by itself, is kept open until its COMMIT. */
  readonly autocommit: Autocommit<C>;
  /** A statement: the session's transactions run at this level; undefined: at its own again. */
  isolation(level: Isolation | undefined): string;
  /**
   * A statement: the session waits so many milliseconds for a lock before it looks for a deadlock, and is the one that
   * is ended if it finds it; undefined: as it was. Absent where the server looks at once, and decides by itself.
   */
  patience?(ms: number | undefined): string;
  /** A serializable transaction can be ended for what others do to any table, not only to those that it touches too. */
  readonly certifies?: boolean;
  /** Tables that are touched together, by foreign keys; with "*" those that may touch any, by triggers. */
  related(connection: C): Promise<readonly (readonly string[])[]>;
  /** Procedures of ours, by their names in lower case. Absent: there are none. */
  routines?(connection: C): Promise<ReadonlyMap<string, RoutineEffect>>;
  /** What statements do besides, by what belongs to a table. */
  effects(connection: C): Promise<readonly TableEffect[]>;
  /** A transaction's snapshot is taken by the first statement that reads without a lock. Else by the first one. */
  readonly lateSnapshot?: boolean;
  /** Keeps what is in the tables now, to bring back what is written in them. */
  keep?(connection: C): Promise<KeptStatement>;
  /**
   * Locks depend on more than what is committed: on rows that were deleted, and that the server still has. Waits until it has none
   * of those that are deleted by now; false: it has, or nobody can know.
   */
  settle?(connection: C): Promise<boolean>;
  /** How to stand between a client and a server. */
  readonly relay?: Relay;
}

/** What whoever stands between a client and a server must know of what they say. */
export interface Relay {
  /** Of a server whose address names none. */
  readonly port: number;
  /** For one connection: cuts what its client sends, so that no statement is sent on before all of it is there. */
  cutter(): (chunk: Uint8Array) => Uint8Array;
  /** How they agree on encryption, where that is done before anything else is said. */
  readonly encryption?: {
    readonly request: Uint8Array;
    readonly granted: Uint8Array;
    readonly denied: Uint8Array;
    /** What a client asks for first; undefined: nothing of the kind. */
    asked(chunk: Uint8Array): "tls" | "other" | undefined;
  };
  /** For one connection: what the server says, without what cannot be had through a proxy. */
  listener?(): (chunk: Uint8Array) => Uint8Array;
}

/**
 * `acts`: whoever writes the table executes statements of a function, of which each may see what others have done since the one before;
 * `acts when read`: whoever reads it does. `decides`: what a write comes to depends on other rows, by a default, a check or a policy.
 * `numbers`, `clock`: a row gets the next number, or the time.
 */
export interface TableEffect {
  /** In lower case. */
  readonly table: string;
  readonly kind: "acts" | "acts when read" | "decides" | "numbers" | "clock";
}

/** What a procedure does whose body is known. */
export interface RoutineEffect {
  /** Which it reads or writes, in lower case. */
  readonly tables: readonly string[];
  /** It leaves a transaction open that it has begun, or commits the one that it is called in. */
  readonly boundary?: "begins" | "commits";
  /** Whatever others commit while it runs, it comes to what it comes to if they do so before or after it. */
  readonly whole: boolean;
}

/** A session, as it says itself. */
export interface Self {
  readonly session: string;
  /** Nothing stands between: it stays the same session for as long as the connection is open. */
  readonly direct: boolean;
  /** Transactions that say nothing else are serializable, by being judged at their end: see `certifies`. */
  readonly serializable: boolean;
}

export interface Autocommit<C extends Connection> {
  readonly begin: string;
  readonly commit: string;
  readonly rollback: string;
  /** Several statements that are sent as one are one transaction. Else each is one by itself. */
  readonly together: boolean;
  /** Functions and procedures, in lower case, that may write, and can be called in a transaction. */
  writers(connection: C): Promise<ReadonlySet<string>>;
  /** A whole answer as it would have been; `refused`: what COMMIT was answered with, if it failed. */
  answer(heard: Uint8Array, after: { readonly inside: boolean; readonly refused?: Uint8Array }): Uint8Array;
  /**
   * Where sessions change behind a pooler: statements for the transaction that has just begun, by which it is known by a name,
   * which the server is asked for, and run at this level.
   */
  mark?(name: string, level: Isolation | undefined): string[];
  marked?(connection: C, name: string): Promise<string | undefined>;
}

export interface KeptStatement {
  /**
   * Brings back what was written, as often as is wanted; nothing else is touched. Throws if somebody else is at work in this
   * database, whose rows could be lost by it.
   */
  restore(written: WrittenTables, ours: OurSessions): Promise<void>;
  forget(): Promise<void>;
}

/** What statements may have written, as far as their text tells. */
export interface WrittenTables {
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
