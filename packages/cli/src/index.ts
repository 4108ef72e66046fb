export { type EmbeddedPostgres, type StartPostgresOptions, startPostgres } from "./embedded.ts";
