/** What an engine keeps of changes that people made by hand: the contract behind `audited`. */
import type { Connection } from "../seam/database.ts";
import type { How, Soon } from "../seam/store.ts";

export interface NewLine {
  readonly actor: string;
  readonly action: string;
  readonly target: string;
  /** JSON. */
  readonly details: string | undefined;
}

export interface LineEnd {
  readonly outcome: "done" | "failed";
  /** JSON. */
  readonly result: string | undefined;
  readonly error: string | undefined;
}

/** Moments are milliseconds of the database's clock. */
export interface WrittenLine {
  readonly id: number;
  readonly at: number;
  readonly actor: string;
  readonly action: string;
  readonly target: string;
  readonly details: unknown;
  /** `begun`: it is under way, or whoever did it died. */
  readonly outcome: "begun" | LineEnd["outcome"];
  readonly result: unknown;
  readonly error: string | undefined;
  readonly ended: number | undefined;
}

export interface Audits<C extends Connection> {
  /** Committed when it resolves. */
  begin(connection: C, line: NewLine, how: How): Soon<number>;
  end(connection: C, id: number, end: LineEnd, how: How): Soon<void>;
  /** Newest first, below this id. */
  list(
    connection: C,
    which: {
      readonly before: number | undefined;
      readonly target: string | undefined;
      readonly most: number;
    },
  ): Soon<readonly WrittenLine[]>;
}
