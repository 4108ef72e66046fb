import type { Capabilities } from "../../seam/capabilities.ts";
import type { Section } from "../../context/section.ts";
import type { Connection } from "../../seam/database.ts";

/** What statements of ours inside a transaction get to know. */
export interface Work<C extends Connection> {
  readonly connection: C;
  readonly capabilities: Capabilities;
  readonly joined: boolean;
  readonly signal: AbortSignal;
  readonly section: Section | undefined;
}
