export { type Audit, type AuditLine, audited, trail } from "./audit.ts";
