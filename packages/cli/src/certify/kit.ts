/** What the probes ask of a server, in the words of its kind. The probes themselves know no SQL. */
import type { Server } from "../server.ts";
import type { Caller } from "./caller.ts";

export const levels = ["read committed", "repeatable read", "serializable"] as const;
export type Level = (typeof levels)[number];

/** `busy`: it was not to be had in the time given, and the transaction is to be rolled back. */
export type Grant = "granted" | "busy";

/** What became of a write: `busy` as above; `refused`: because of what somebody else has done. */
export type Done = "done" | "busy" | "refused" | "duplicate";

/** Rows of the table that the probes share: `id`, and a number `n`, which is 0 at first. */
export const rowIds = Array.from({ length: 16 }, (_, i) => i + 1);
/** Further rows, for locks that are rows: as many as there are keys. */
export const keyRows = Array.from({ length: 16 }, (_, i) => i + 101);

/** How long a wait lasts that is to be seen to end, at the least, on the servers with the coarsest clock for it. */
export const shortMs = 300;
/** How long what must come to an end may take to do so. */
export const longMs = 10_000;

export interface Kit {
  /** What is made before, one statement at a time. */
  readonly make: readonly string[];
  /** What removes it, whatever of it is there, without a long wait. */
  readonly remove: readonly string[];
  /** What it is called, for people. */
  readonly made: string;
  /** What each session begins with. */
  readonly opening?: string;

  begin(caller: Caller, level: Level): Promise<void>;
  /** Opens a transaction with a lock, as Holdfast does. 0: without a wait. Busy: the transaction is over. */
  open(caller: Caller, key: number, ms: number): Promise<Grant>;
  /** Takes a lock inside of a transaction; absent where a transaction has it from its beginning. */
  lock?(caller: Caller, key: number, ms: number): Promise<Grant>;
  /** The same, together with others who do so. */
  share?(caller: Caller, key: number): Promise<Grant>;
  end(caller: Caller, how: "COMMIT" | "ROLLBACK"): Promise<Done>;
  savepoint(caller: Caller, action: "set" | "rollback"): Promise<void>;

  read(caller: Caller, id: number): Promise<number | undefined>;
  write(caller: Caller, id: number, n: number): Promise<Done>;
  insert(caller: Caller, id: number): Promise<Done>;
  /** Sets n if it is what it was: "done", or "refused". */
  swap(caller: Caller, id: number, from: number, to: number): Promise<Done>;
  /** Row locks, of those that could be had. */
  rows?(caller: Caller, ids: readonly number[], wait: "skip" | "nowait" | number): Promise<number[] | "busy">;

  /** The level that the transaction has, as the server says it. */
  level?(caller: Caller): Promise<string>;
  /** Of the server's session that answers. */
  id?(caller: Caller): Promise<string>;
  /** Locks of a session: whether it has it now, whether it had it. */
  take?(caller: Caller, key: number): Promise<boolean>;
  give?(caller: Caller, key: number): Promise<boolean>;
  /** Whether a message of one session reaches another. */
  message?(server: Server): Promise<boolean>;
  /** Makes a routine, and returns what it answers to 41: 42. */
  routine?(caller: Caller): Promise<number>;
  /** A transaction with a lock, which the server is to end after so long. */
  limited?(caller: Caller, key: number, ms: number): Promise<void>;
  /** The name of a transaction, by which it can be asked for later: "committed", "aborted". */
  identity?(caller: Caller): Promise<string>;
  outcome?(caller: Caller, identity: string): Promise<string>;
  /** Milliseconds. */
  clock(caller: Caller): Promise<number>;

  /** The kind of cluster that the server is set up to be one node of. */
  cluster?(server: Server): Promise<string | undefined>;

  /** Of probes that ask for something that this kind of server deliberately does not have. */
  readonly gaps: Readonly<Record<string, string>>;
}
