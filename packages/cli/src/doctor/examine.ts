/** Runs checks one by one. */
import { describe } from "../describe.ts";
import { Failure, serversOwn } from "../failure.ts";
import { unless } from "../unless.ts";
import { remedyOfNoConnection } from "../no-connection.ts";
import { within } from "../within.ts";
import { checkMs } from "./bounded.ts";
import { type Check, CouldNotLook, type Finding, blind, severities } from "./check.ts";
import type { Patient } from "./patient.ts";

export type Status = "ok" | "found" | "could-not-look";

export interface Examined {
  readonly id: string;
  readonly title: string;
  readonly status: Status;
  /** The worst first, and no more than people read. */
  readonly findings: readonly Finding[];
  /** Further ones, not among `findings`. */
  readonly more: number;
}

export interface Watch {
  readonly signal: AbortSignal;
  /** Told when the server has said what it is, before the first check. */
  admitted(server: { readonly title: string; readonly version: string }): void;
  /** Told before each check. */
  progress(id: string): void;
  /** Told after each check: the next one may never end. */
  done(examined: Examined): void;
}

const most = 20;

export async function examine<P extends Patient>(
  patient: P,
  checks: readonly Check<P>[],
  { signal, progress, done }: Watch,
): Promise<void> {
  for (const check of checks) {
    progress(check.id);
    const found = await unless(signal, ask(patient, check));
    const sorted = found.toSorted((a, b) => severities.indexOf(a.severity) - severities.indexOf(b.severity));
    done({
      id: check.id,
      title: check.title,
      status: found.length === 0 ? "ok" : found.every(({ blind }) => blind) ? "could-not-look" : "found",
      findings: sorted.slice(0, most),
      more: Math.max(0, sorted.length - most),
    });
  }
}

async function ask<P extends Patient>(patient: P, check: Check<P>): Promise<readonly Finding[]> {
  try {
    return await within(checkMs, check.run(patient));
  } catch (error) {
    if (error instanceof CouldNotLook) return [blind(error.message, error.fix)];
    const known = patient.hindrance(serversOwn(error));
    if (known) return [known];
    // A server that is gone answers nothing any more; one that is there took offence at this question only.
    try {
      await patient.renew();
    } catch (cause) {
      const remedy = remedyOfNoConnection(serversOwn(cause));
      throw new Failure(
        `The connection to ${patient.server.shown} is lost: ${describe(cause)}.${remedy === undefined ? "" : ` ${remedy}`}`,
        { cause },
      );
    }
    return [blind(describe(error), `holdfast doctor --only ${check.id}`)];
  }
}
