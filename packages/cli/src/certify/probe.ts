/** What a probe is, and what it finds. */
import type { Capabilities, Isolation } from "holdfast";
import type { Server } from "../server.ts";
import type { Caller } from "./caller.ts";
import type { Kit } from "./kit.ts";

/** Those of which Holdfast says "yes" or "no". */
export type Capability = keyof Capabilities;

/**
 * `holds`: it is as it should be. `fails`: Holdfast relies on it, and it is not so. `absent`: it is not so, and Holdfast knows: what
 * needs it is refused, or done in another way. `unknown`: it could not be tried.
 */
export const verdicts = ["fails", "unknown", "absent", "holds"] as const;
export type Verdict = (typeof verdicts)[number];

/** What was seen. `no` becomes `fails` or `absent`, by what Holdfast itself believes. */
export interface Seen {
  readonly verdict: "yes" | "no" | "absent" | "unknown";
  readonly what: string;
}

export const yes = (what: string): Seen => ({ verdict: "yes", what });
export const no = (what: string): Seen => ({ verdict: "no", what });
export const absent = (what: string): Seen => ({ verdict: "absent", what });
export const unknown = (what: string): Seen => ({ verdict: "unknown", what });

/** Where probes are run. */
export interface Ground {
  readonly server: Server;
  readonly kit: Kit;
  /** The sessions are on nodes that exclude each other at COMMIT only, and read what the others have committed a moment later. */
  readonly atCommit: boolean;
  /** A new session, which ends with the probe. Between two nodes: on each of them in turn. */
  caller(): Promise<Caller>;
  /** A number that no row has had. */
  next(): number;
  /** A key that nobody has. */
  key(): number;
  /** Of those before. */
  verdictOf(id: string): Verdict | undefined;
}

export interface Probe {
  readonly id: string;
  /** What is promised if it holds. */
  readonly title: string;
  /** How it is tried. */
  readonly tried: string;
  /** Those that stand or fall with it. If Holdfast has none of them here, it is absent. */
  readonly carries: readonly Capability[];
  /** Of those that carry `isolation`: the level that they are about. */
  readonly level?: Isolation;
  /** The same for people. */
  readonly features: string;
  /** What to do if it is not so. */
  readonly advice: string;
  /** It needs no table. */
  readonly readsOnly?: true;
  /**
   * It is also tried between nodes. `held`: it needs locks that are held on all nodes, or reads that are never late. `at commit`: it holds
   * as well where nodes compare at COMMIT what they have written.
   */
  readonly across?: "held" | "at commit";
  /** Which of its sessions, and no other, commits what it writes: so it can be tried without a write on the other node. */
  readonly writer?: "A" | "B";
  /** The part of a kit that it cannot do without. */
  readonly needs?: readonly (keyof Kit)[];
  run(ground: Ground): Promise<Seen>;
}

/** One line of the report. */
export interface Line extends Omit<Probe, "run" | "readsOnly" | "needs" | "across" | "writer" | "level"> {
  readonly verdict: Verdict;
  readonly seen: string;
  /** Tried between the first node and this one. Absent: on the first node alone. */
  readonly node?: number;
}

export const lineOf = (
  { id, title, tried, carries, features, advice }: Omit<Probe, "run">,
  verdict: Verdict,
  seen: string,
): Line => ({ id, title, tried, carries, features, advice, verdict, seen });
