/**
 * What is done while locks are held. Told from here, where locks are taken and given back, to whoever watches: `watch/`
 * does, if the instance is to be watched.
 */
import { Inside } from "./inside.ts";
import type { HazardKind } from "../seam/errors.ts";
import type { LockRequest } from "../seam/key.ts";
import type { CallSite } from "./call-site.ts";

export { type HazardKind, hazardKinds } from "../seam/errors.ts";

/** What one call locks. */
export type Locked =
  | { readonly kind: "key"; readonly keys: readonly LockRequest[] }
  /**
   * `name`: of the table, of the lease, of what a pattern's call has changed; "database" where a transaction that writes
   * keeps all others out.
   */
  | {
      readonly kind: "rows" | "table" | "lease" | "call" | "database";
      readonly name: string;
      /** Others may have the same at the same time. */
      readonly shared?: boolean;
    };

export type Answered = () => void;

/** The same promise, for whoever waits for it; `answered` is called first. */
export function answering<T>(answer: Promise<T>, answered: Answered): Promise<T> {
  return answer.then(
    (value) => {
      answered();
      return value;
    },
    (error: unknown) => {
      answered();
      throw error;
    },
  );
}

/** A transaction, from its first lock to its end. */
export interface Section {
  /** Whether anybody wants to know the places of what it locks: they are the dearest part of it. */
  readonly wantsPlaces: boolean;
  /** Whether it will be told of its end: else nothing that follows can be said to be inside of it. */
  readonly ends: boolean;
  /** It is about to wait for them. */
  asks(what: Locked, site: CallSite | undefined): void;
  /** They are held from now on, until the end. */
  took(what: Locked, site: CallSite | undefined): void;
  /**
   * A statement of the caller's own is sent. `again`: it has been told of, when it was prepared, without values. Returns what to call when it is
   * answered, where anybody wants to know that.
   */
  sent(statement: unknown, values?: readonly unknown[], again?: boolean): Answered | undefined;
  /** A savepoint is set, released, or has been rolled back to. */
  savepoint(what: { readonly action: "set" | "release" | "rollback"; readonly name: string }): void;
  saw(kind: HazardKind, site: CallSite): void;
  /** What its body is to fail with, where hazards are to be errors. */
  readonly failure: Error | undefined;
  /** What is sent from now on is late. */
  left(): void;
  /** Locks are given back. */
  end(): void;
}

/** What an instance is watched by. */
export interface Watch {
  /** Whether anybody wants to know where transactions are opened. */
  readonly wantsPlaces: boolean;
  section(site: CallSite | undefined): Section;
  /** Of a transaction that the caller opened. `settled`: calls back when it has ended, where the client tells. */
  joined(
    native: object,
    settled: ((then: () => void) => void) | undefined,
    site: CallSite | undefined,
  ): Section;
  close(): void;
}

/** The section that the calling code is in: the innermost one, of whatever instance. */
export const sections = new Inside<Section>();

let watching = 0;

/** Somebody watches, until what this returns is called. */
export function watchSections(): () => void {
  watching++;
  let over = false;
  return () => {
    if (!over) watching--;
    over = true;
  };
}

/** The same, or undefined at once while nobody watches. */
export function sectionHere(): Section | undefined {
  return watching > 0 ? sections.getStore() : undefined;
}
