export { type EmbeddedPostgres, type StartPostgresOptions, startPostgres } from "./embedded.ts";
export type { RaceContext, RaceFactory, RaceScenario } from "./race/load.ts";
