/** Changes: somebody says yes, and the audit has who did what, and what became of it. */
import { hostname, userInfo } from "node:os";
import { HoldfastError } from "holdfast";
import { audited } from "holdfast/audit";
import { confirmed, declined } from "../confirm.ts";
import { describe } from "../describe.ts";
import type { Server } from "../server.ts";
import { shown } from "../text.ts";
import { userOf } from "../user.ts";
import type { PlaceOptions } from "./place.ts";

export interface ChangeOptions extends PlaceOptions {
  readonly yes?: true;
  readonly note?: string;
}

export interface Change {
  /** Ends with a question mark. */
  readonly question: string;
  /** "queue.retry". */
  readonly action: string;
  /** What it is about, from the outside in: ["queue", "emails"]. */
  readonly target: readonly string[];
  readonly details?: Readonly<Record<string, unknown>>;
}

export interface By {
  readonly actor: string;
  /** The line of the audit. */
  readonly line: number;
}

export function targetOf(parts: readonly string[]): string {
  return parts.map((part) => part.replaceAll("\0", "\ufffd")).join(":");
}

export async function actorOf(server: Server): Promise<string> {
  return `${systemUser()}@${hostname()} as ${await userOf(server)}`;
}

function systemUser(): string {
  try {
    return userInfo().username;
  } catch {
    // A container may run under a number that has no name.
    return `uid ${process.getuid?.() ?? "unknown"}`;
  }
}

/** Undefined: the answer was no, and nothing was done. */
export async function change<T>(
  server: Server,
  { question, action, target, details }: Change,
  options: ChangeOptions,
  work: (by: By) => Promise<T>,
): Promise<T | undefined> {
  if (!(await agreed(question, options))) return undefined;
  const actor = await actorOf(server);
  const what = { action, target: targetOf(target), actor, details: { ...details, note: options.note } };
  return audited(server.hf, what, (line) => work({ actor, line }));
}

export interface RecordOptions {
  readonly note?: string | undefined;
  /** Told that it could not be written down. */
  warn(text: string): void;
  /** Done also if it cannot be written down: ending whoever is in everybody's way cannot wait for that. */
  readonly anyway?: boolean;
}

/** What was agreed to before. Where no audit is kept it is done all the same. */
export async function recorded<T>(
  server: Server,
  { action, target, details }: Omit<Change, "question">,
  { note: why, warn, anyway = false }: RecordOptions,
  work: () => Promise<T>,
): Promise<T> {
  const actor = await actorOf(server);
  const what = { action, target: targetOf(target), actor, details: { ...details, note: why } };
  let begun = false;
  try {
    return await audited(server.hf, what, () => {
      begun = true;
      return work();
    });
  } catch (error) {
    const none = error instanceof HoldfastError && error.code === "HF_UNSUPPORTED";
    if (begun || !(anyway || none)) throw error;
    warn(`This is not written down in an audit: ${shown(describe(error)).replace(/\.$/, "")}.`);
    return work();
  }
}

export async function agreed(question: string, { yes, json }: ChangeOptions): Promise<boolean> {
  if (await confirmed(question, yes)) return true;
  declined(json);
  return false;
}
